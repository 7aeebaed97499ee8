// Paged attention. Included inside namespace kvd::KVD_LEVEL.

static void attend(const void *, const KvdBatch &, Worker &) { __builtin_trap(); }
static void attend_merge(const void *, const KvdBatch &, Worker &) { __builtin_trap(); }
