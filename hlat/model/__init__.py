"""The Llama decoder as mathematics: its parameters, their initial values, its forward pass."""
