"""What the package stands on: values that cross a boundary, the strategy of speculation, configuration
(config/), the user's files and processes (io/)."""
