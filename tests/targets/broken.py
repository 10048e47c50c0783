"""A file that cannot be imported."""


def setup():
    import module_that_is_absent  # noqa: F401


setup()
