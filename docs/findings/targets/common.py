"""What the adapters share: the site with the packages, a pretended GPU, conversions."""

import contextlib

import torch


@contextlib.contextmanager
def pretend_cuda():
    """Tensors say that they are on a GPU; a kernel that insists on one then runs in Triton's interpreter."""
    if torch.cuda.is_available():
        yield
        return
    before = torch.cuda.is_available, torch.cuda.get_device_properties, torch.cuda.get_device_capability
    torch.Tensor.is_cuda = property(lambda self: True)
    torch.cuda.is_available = lambda: True
    from types import SimpleNamespace

    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(
        major=9, minor=0, total_memory=2**36, multi_processor_count=132, name="none"
    )
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    try:
        yield
    finally:
        del torch.Tensor.is_cuda
        torch.cuda.is_available, torch.cuda.get_device_properties, torch.cuda.get_device_capability = before


def refuse(condition, why):
    if condition:
        raise NotImplementedError(why)
