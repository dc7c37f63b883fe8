"""How one model is cut over processes, as pure data: the mesh, the plan, the pipeline stages."""
