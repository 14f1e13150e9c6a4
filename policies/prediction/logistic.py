"""Logistic regression for many outputs at once, by stochastic gradient descent in numpy."""

import itertools
from dataclasses import dataclass

import numpy as np

from moe_runtime.policies.prediction.estimator import sigmoid

# n rows, F features of each expert, X features of the token, E experts

_BATCH_ROWS = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class LogisticFit:
    """Weights of ``logits = aligned . aligned_F + dense @ dense_XE + bias_E``."""

    aligned_F: np.ndarray
    dense_XE: np.ndarray
    bias_E: np.ndarray


class Adam:
    """Adam with decoupled weight decay and a rate that rises for a tenth of the steps, then falls.

    Kingma and Ba, arXiv 1412.6980; Loshchilov and Hutter, arXiv 1711.05101. Works in place.
    """

    def __init__(self, parameters: list[np.ndarray], *, num_steps: int, rate: float, decay: float):
        self._parameters = parameters
        self._num_steps, self._rate, self._decay = max(num_steps, 1), rate, decay
        self._means = [np.zeros_like(p) for p in parameters]
        self._squares = [np.zeros_like(p) for p in parameters]
        self._step = 0

    def step(self, gradients: list[np.ndarray]) -> None:
        """Moves all parameters; matrices decay, vectors (biases) do not."""
        self._step += 1
        done = self._step / self._num_steps
        rate = self._rate * min(10 * done, (1.0 - done) / 0.9 + 1e-3)
        mean_share, square_share = 1 - 0.9**self._step, 1 - 0.99**self._step
        moments = zip(self._parameters, gradients, self._means, self._squares, strict=True)
        for parameter, gradient, mean, square in moments:
            mean += 0.1 * (gradient - mean)
            square += 0.01 * (gradient * gradient - square)
            if parameter.ndim > 1:
                parameter *= 1.0 - rate * self._decay
            parameter -= (rate / mean_share) * mean / (np.sqrt(square / square_share) + 1e-8)


def fit_logistic(
    aligned: np.ndarray, dense: np.ndarray, target: np.ndarray, *, seed: int, epochs: int = 6
) -> LogisticFit:
    """Fits by cross-entropy; equal input and seed give equal weights on one machine.

    Args:
        aligned: ``[n, F, E]`` features of each expert; an expert's logit sees only its own,
            with one weight per feature for all experts.
        dense: ``[n, X]`` features that every expert's logit sees.
        target: ``[n, E]`` 1 where the expert was visited, else 0.
    """
    num_rows, num_features, num_experts = aligned.shape
    aligned_scale = aligned.std(axis=(0, 2), dtype=np.float64).astype(np.float32) + 0.05
    dense_mean, dense_scale = dense.mean(axis=0), dense.std(axis=0) + 0.05
    base_E = np.clip(target.mean(axis=0), 1e-3, 1 - 1e-3)
    w_F = np.zeros(num_features, dtype=np.float32)
    w_XE = np.zeros((dense.shape[1], num_experts), dtype=np.float32)
    b_E = np.log(base_E / (1 - base_E)).astype(np.float32)
    batches = max(num_rows // _BATCH_ROWS, 1)
    adam = Adam([w_F, w_XE, b_E], num_steps=epochs * batches, rate=4e-3, decay=0.02)
    rng = np.random.default_rng(seed)
    bounds = np.linspace(0, num_rows, batches + 1).astype(int).tolist()
    for _ in range(epochs):
        # shuffled once an epoch, features first: the numbers of a step are then contiguous
        order = rng.permutation(num_rows)
        aligned_FnE = aligned[order].transpose(1, 0, 2).astype(np.float32, order="C")
        aligned_FnE /= aligned_scale[:, None, None]
        dense_nX, target_nE = (dense[order] - dense_mean) / dense_scale, target[order]
        for start, stop in itertools.pairwise(bounds):
            a_Fm = aligned_FnE[:, start:stop].reshape(num_features, -1)
            x = dense_nX[start:stop]
            logits = (w_F @ a_Fm).reshape(-1, num_experts) + x @ w_XE + b_E
            error = (sigmoid(logits) - target_nE[start:stop]) / len(x)
            adam.step([a_Fm @ error.ravel(), x.T @ error, error.sum(axis=0)])
    dense_XE = w_XE / dense_scale[:, None]
    return LogisticFit(
        aligned_F=(w_F / aligned_scale).astype(np.float32),
        dense_XE=dense_XE.astype(np.float32),
        bias_E=(b_E - dense_mean @ dense_XE).astype(np.float32),
    )
