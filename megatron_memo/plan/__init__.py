"""Memory planning: from traces to verified plans, by dynamic storage allocation (DSA) with proof.

`requests` says what a trace asks of a plan, `planner.make_plan` makes one, `plan_file` writes and
loads it, `verify_plan` checks it. Below that: `problem` says what is to be solved,
`portfolio.solve` solves it, `verify` checks the layout; the verifiers share no code with the
solvers. `caching_allocator` says what PyTorch's allocator would need. Nothing in this package
imports torch: planning works on a login node.
"""
