"""Problems and their scores; rewards/ scores responses in worker processes, which import neither torch nor
transformers."""
