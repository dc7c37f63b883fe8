"""Layout of one model over processes as pure data: the mesh, sharding rules, pipeline stages."""
