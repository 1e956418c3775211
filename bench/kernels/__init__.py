"""Speed and errors of the kernels, on a CPU and on a GPU."""
