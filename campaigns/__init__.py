"""Campaigns, one YAML file each."""
