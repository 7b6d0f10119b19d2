"""What the allocator refuses."""


class AllocatorError(ValueError):
    """The allocator can't be had or can't do what was asked; one line that says why."""
