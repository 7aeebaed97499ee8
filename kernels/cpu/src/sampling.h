// Choosing tokens. Included inside namespace kvd::KVD_LEVEL.

static void sample(const void *, const KvdBatch &, Worker &) { __builtin_trap(); }
