"""Data that are read while a run goes on: shards on a disk or in a bucket, in chunks that an index knows."""
