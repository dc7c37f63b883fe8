"""Environment, packages and compile cache of Trainium."""
