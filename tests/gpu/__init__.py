"""Checks on GPUs with NCCL (``make gpu``), each in processes of its own with a deadline. ``--device cpu`` uses Gloo."""
