"""Record of the runs below a root: an index of run directories, filters, comparison and export."""
