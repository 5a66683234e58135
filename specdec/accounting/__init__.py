"""`specdec memory`: the bytes that a forward reads, and the speed that they allow."""
