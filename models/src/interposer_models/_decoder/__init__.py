"""The parts of decoders, and the settings read from config.json."""
