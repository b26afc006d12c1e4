"""LoRA adapters: read files of PEFT, and add low-rank sums to layers."""
