"""The law that ties the best learning rate to the batch, for optimizers that step by signs.

NOTE: the law
-------------
Adam divides each gradient by its own size, so in the limit of much noise a step is the gradient's
sign times the learning rate. Of a batch of B tokens the mean sign of a coordinate grows as sqrt(B);
the curvature that punishes a step has a part that all coordinates pay alone (constant) and one that
they pay together (the product of two mean signs, so it grows as B). The best learning rate is the
quotient of both:

    lr(B) = 2 * lr_max / (sqrt(B_noise / B) + sqrt(B / B_noise))

It rises as sqrt(B), has its largest value lr_max at B = B_noise, and falls as 1 / sqrt(B). At that
best rate, the steps and tokens to a given loss are

    steps  = steps_min  * (1 + B_noise / B)
    tokens = tokens_min * (1 + B / B_noise)

Source: Li et al. 2024, "Surge Phenomenon in Optimal Learning Rate and Batch Size Scaling", arXiv
2405.14578. tests/lr_scale/test_sign_descent.py finds best rates by a scan and compares.

Limits: signs stop being noisy at batches far above B_noise, where the best rate settles at a
constant above the law's; B_noise grows while the loss falls; the law knows no warm-up, decay of the
rate or of the weights, and takes momentum as it is. With a square-root or linear rule (those are
for SGD) it has nothing in common.
"""

from __future__ import annotations

import math


def relative_rate(batch: float, noise: float) -> float:
    """The best learning rate as a fraction of the largest, above 0 and at most 1.

    Args:
        batch: tokens of a step.
        noise: B_noise, in tokens.
    """
    return 2.0 / (math.sqrt(noise / batch) + math.sqrt(batch / noise))


def relative_steps(batch: float, noise: float) -> float:
    """Steps to a given loss, relative to the fewest that any batch needs; above 1."""
    return 1.0 + noise / batch


def relative_tokens(batch: float, noise: float) -> float:
    """Tokens to a given loss, relative to the fewest that any batch needs; above 1."""
    return 1.0 + batch / noise
