"""The test suite. A package, so that rank processes can import test functions by name."""

import os

# Tests compare bits. Some kernels of MKL add up in another order if an operand is not aligned, and parameters lie
# anywhere in a flat buffer. This mode excludes such kernels. MKL reads it once, so it is set before torch is imported.
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")
