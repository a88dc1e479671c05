"""Problems and their scores. Workers of rewards/ import neither torch nor transformers."""
