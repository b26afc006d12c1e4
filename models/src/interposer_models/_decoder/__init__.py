"""The parts of decoders, and the decoder settings that config.json states."""
