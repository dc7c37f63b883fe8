"""Jobs of schedulers, and campaigns: stages that run as jobs."""
