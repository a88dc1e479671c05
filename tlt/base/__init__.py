"""What all else stands on: shared types, configuration (config/), files and processes (io/)."""
