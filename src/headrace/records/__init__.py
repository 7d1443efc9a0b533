"""Record batches of format v2: header view, record codec, builder, compression."""
