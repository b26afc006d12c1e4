"""GPUs of Intel as a platform of interposer."""
