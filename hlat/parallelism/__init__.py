"""Layout of one model over processes as pure data: the mesh and the pipeline stages."""
