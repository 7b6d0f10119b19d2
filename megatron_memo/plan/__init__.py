"""Memory planning: dynamic storage allocation (DSA) with proof.

`problem` says what is to be solved, `portfolio.solve` solves it, `verify` checks the answer and
shares no code with the solvers, `caching_allocator` says what PyTorch's allocator would need.
Nothing in this package imports torch: planning works on a login node.
"""
