"""Local and object-store paths, durable writes, and progress of long reads and writes."""
