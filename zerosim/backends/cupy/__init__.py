"""CuPy: the kernels on a GPU, traced from NumPy's functions into CUDA, and a cluster in this process that uses them."""
