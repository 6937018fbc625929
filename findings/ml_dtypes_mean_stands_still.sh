#!/usr/bin/env bash
# Guess: the mean of a bfloat16 array is near that of its values: numpy adds in pairs, and a mean of float16 in float32.
# Seen: both are for numpy's own types. It adds bfloat16 element after element in bfloat16, and a sum of 256 does not
#   grow by values below 1. The mean of 4,096 values between 0 and 1 is 0.0625, the standard deviation 0.25. With
#   dtype=float32 the mean is right; the median is right without it.
# Version: ml_dtypes 0.6.0 with numpy 2.4.6. JAX and Orbax give bfloat16 to numpy as this type.
# Why it matters: a loss over a batch, a mean of metrics, or statistics of weights, computed on the host from what a model
#   or a checkpoint has in bfloat16, are too small by any factor, and fall as the array grows. Nothing warns.
source "$(dirname "$0")/environment"
packages ml_dtypes==0.6.0 numpy==2.4.6
program <<'PYTHON'
import ml_dtypes
import numpy as np
from finding import compare, show_versions

show_versions("ml_dtypes", "numpy")
values = np.arange(4096) % 64 / 64  # exact in both types; the mean is 0.4922
for kind, known in ((np.float16, [0.4922, 0.2886]), (ml_dtypes.bfloat16, [0.0625, 0.25])):
    array = values.astype(kind)
    compare(
        f"mean and standard deviation of 4,096 values of {np.dtype(kind)} between 0 and 1",
        guess=[0.4922, 0.2886],
        seen=[round(float(array.mean()), 4), round(float(array.std()), 4)],
        known=known,
    )
compare(
    "mean of the same bfloat16 array with dtype=float32, and its median",
    guess=[0.4922, 0.4922],
    seen=[round(float(array.mean(dtype=np.float32)), 4), round(float(np.median(array)), 4)],
    known=[0.4922, 0.4922],
)
PYTHON
