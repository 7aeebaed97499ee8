// Activations to int8 codes per row and group. Included inside namespace kvd::KVD_LEVEL.

static void quantize(const void *, const KvdBatch &, Worker &) { __builtin_trap(); }
