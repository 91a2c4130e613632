"""A stand-in for flash_attn, which runs on GPUs only."""
