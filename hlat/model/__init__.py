"""Parameters, initialization and forward pass of the Llama decoder."""
