"""Text generation on the command line."""
