"""Problems and their scores; rewards/ scores responses in worker processes."""
