"""Fused kernels and their plain twins (`plain`; the solvers' are in `sampling.solvers`).

Modules here but `plain` and `fp8` import Triton, which comes with torch's CUDA builds; `registry.load` imports them
when a kernel is first used. A fused kernel computes in float32 and rounds where its twin rounds; none has a backward
pass.
"""
