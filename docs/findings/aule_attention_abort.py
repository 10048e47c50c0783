"""aule-attention: on a machine without Vulkan the first call with CPU tensors aborts the process.

The package calls its Vulkan library available when its Python module can be imported; the library then panics (SIGABRT) where
libvulkan.so.1 is missing, instead of falling back to NumPy.
"""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

try:
    release = version("aule-attention")
except PackageNotFoundError as error:
    print(f"cannot run here: no package {error}")
    sys.exit(77)

CALL = "import aule, torch; x = torch.ones(1, 1, 2, 4); print(aule.flash_attention(x, x, x)[0, 0, 0, 0].item())"
done = subprocess.run([sys.executable, "-c", CALL], capture_output=True, text=True, check=False)
last = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[:3]
print(f"aule-attention {release}; {CALL}")
print(f"expected exit status 0 and 1.0; actual exit status {done.returncode} and {' | '.join(last)}")
sys.exit(done.returncode != 0)
