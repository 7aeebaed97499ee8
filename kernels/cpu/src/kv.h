// Rope, quantisation of K and V, writing into blocks. Included inside namespace kvd::KVD_LEVEL.

static void rope_write(const void *, const KvdBatch &, Worker &) { __builtin_trap(); }
