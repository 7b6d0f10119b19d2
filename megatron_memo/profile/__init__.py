"""What a run asks of memory: traces of its requests, and accounting of live storage.

`trace` is the format everything else reads and writes, and imports no torch.
"""
