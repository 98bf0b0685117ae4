"""Model families, one folder each: `card` (what a checkpoint is), `forward` (ops), `program` (loops)."""
