"""LoRA adapters: reading PEFT's files, and adding low-rank sums to the outputs of layers."""
