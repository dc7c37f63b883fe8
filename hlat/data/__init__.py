"""Arrow and Parquet files in, token batches out.

The order of the batches depends on the seed, the sources and the global batch size only. A run
reads the same batches with any number of ranks, any prefetch depth and after any resume.
"""
