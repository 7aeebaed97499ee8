"""The GPU backend: Triton kernels, arithmetic a16. Imported only where it is asked for; needs triton, not a GPU.

With TRITON_INTERPRET=1 in the environment before the first import the kernels run on CPU tensors, element by element in
numpy: the way in which tests prove the arithmetic on a machine without a GPU, and nothing to serve from.
"""
