"""What the product takes on a GPU, measured against what the same GPU can do and against other attention kernels."""
