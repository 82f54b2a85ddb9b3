/* A CUDA runtime library for machines without a GPU: what torch's CUDA build calls, on the host.
 *
 * Device memory is two mappings of one size.  The addresses handed out belong to one that nobody may
 * touch, so that a host read of a device pointer is a segmentation fault, as with a GPU; the bytes
 * are at a fixed distance, in the other.  Kernels do nothing.  Work on a stream takes effect in the
 * order of the calls.  When the host sees that it is done depends on standin_lag: at once, or only
 * once the host waits for it.  A failing kernel is seen once the host waits or asks, and then each
 * call that needs the context returns its error, as CUDA's sticky errors do.
 *
 * build.py adds the functions that have no effect here, and refuses those that are not written.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "cuda_runtime_api.h"
#include "error_texts.h"

#define HOST 0    /* needs no context */
#define CONTEXT 1 /* makes the context; returns a sticky error */
#define UNKNOWN 2 /* nobody has documented whether it returns a sticky error: see standin_narrow */
#define UNSAFE 4  /* not allowed while a stream is captured */

typedef struct CUstream_st stream_t;
typedef struct CUevent_st event_t;
typedef struct CUgraph_st graph_t;

enum kind { WORK, COPY_OUT, FAULT, HOST_CALL, EVENT, WAIT, COPY, FILL, KERNEL, PYTHON };

/* One operation, in the queue of a stream or in a graph. */
typedef struct op {
    enum kind kind;
    uint64_t seq;
    void *to;
    const void *from;
    size_t n;
    int value; /* of FILL; the error of FAULT */
    const char *text; /* of FAULT; the name of a KERNEL */
    cudaHostFn_t call;
    void *data;
    event_t *event;
    stream_t *other;
    uint64_t until; /* what WAIT waits for in the other stream; the number of PYTHON */
    struct op *next;
} op_t;

struct CUgraph_st {
    op_t *first, **end;
    size_t n;
    int is_invalid, is_open;
    enum cudaStreamCaptureMode mode;
    pthread_t thread;
    unsigned long long id;
    graph_t *next;
};

struct CUstream_st {
    uint64_t issued;
    int priority;
    op_t *first, **end;
    graph_t *capture;
    stream_t *next;
};

struct CUevent_st {
    unsigned flags;
    int is_recorded, is_complete;
    stream_t *stream;
    uint64_t seq;
    double time_us;
    graph_t *capture;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static stream_t legacy = {.end = &legacy.first}, *streams;
static graph_t *captures;
static int lags, is_narrow, has_context, is_forked, sticky, pending_faults;
static struct { uint64_t waits, blocked, launches, copies_out, graphs; } count;
static __thread cudaError_t last_error;
static __thread enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
static void (*python)(uint64_t);

/* --- memory ----------------------------------------------------------------------------------- */

typedef struct block {
    uintptr_t at;
    size_t n;
    struct block *next;
} block_t;

#define TOTAL ((size_t)80 << 30)
#define GRAIN 512
static size_t used;
static uintptr_t base;
static intptr_t shift; /* from a device address to its bytes */
static block_t *blocks, *pinned; /* blocks by address */

static void map_memory(void) {
    if (base) return;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *closed = mmap(NULL, TOTAL, PROT_NONE, flags, -1, 0);
    void *open = mmap(NULL, TOTAL, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (closed == MAP_FAILED || open == MAP_FAILED) {
        perror("stand-in: the device memory cannot be mapped");
        abort();
    }
    base = (uintptr_t)closed;
    shift = (intptr_t)open - (intptr_t)closed;
}

static int on_device(const void *p) { return base && (uintptr_t)p - base < TOTAL; }
static void *bytes_of(const void *p) { return (char *)p + (on_device(p) ? shift : 0); }

static void *allocate(size_t n) {
    map_memory();
    n = n ? (n + GRAIN - 1) / GRAIN * GRAIN : GRAIN;
    uintptr_t at = base;
    block_t **link = &blocks;
    for (; *link && (*link)->at - at < n; link = &(*link)->next) at = (*link)->at + (*link)->n;
    if (n > TOTAL || at - base > TOTAL - n) return NULL;
    block_t *made = malloc(sizeof *made);
    *made = (block_t){at, n, *link};
    *link = made;
    used += n;
    return (void *)at;
}

/* Take a block out of a list; 0 if it is not there. */
static size_t take_out(block_t **list, const void *p) {
    for (block_t **link = list; *link; link = &(*link)->next)
        if ((*link)->at == (uintptr_t)p) {
            block_t *gone = *link;
            size_t n = gone->n;
            *link = gone->next;
            free(gone);
            return n;
        }
    return 0;
}

static int release(void *p) {
    size_t n = take_out(&blocks, p);
    used -= n;
    uintptr_t from = ((uintptr_t)p + shift + 4095) & ~4095ul, to = ((uintptr_t)p + shift + n) & ~4095ul;
    if (n && to > from) madvise((void *)from, to - from, MADV_DONTNEED);
    return n > 0;
}

static void pin(void *p, size_t n) {
    block_t *made = malloc(sizeof *made);
    *made = (block_t){(uintptr_t)p, n ? n : 1, pinned};
    pinned = made;
}

static block_t *block_of(block_t *list, const void *p) {
    while (list && (uintptr_t)p - list->at >= list->n) list = list->next;
    return list;
}

static int is_beyond(const void *p, size_t n) {
    if (!n || !on_device(p)) return 0;
    block_t *block = block_of(blocks, p);
    return !block || (uintptr_t)p + n > block->at + block->n;
}

/* --- faults ----------------------------------------------------------------------------------- */

typedef struct fault {
    char *what, *text;
    uint64_t at;
    int code;
    struct fault *next;
} fault_t;
static fault_t *faults;
static __thread fault_t next_fault;

/* The fault that is due at a kernel's launch, or at a call of the library by its exact name. */
static fault_t *fault_of(const char *name, int is_call) {
    fault_t *due = NULL;
    for (fault_t *f = faults; f; f = f->next) {
        int is_meant = is_call ? !strncmp(f->what, "call:", 5) && !strcmp(f->what + 5, name)
                               : strstr(name, f->what) != NULL;
        if (is_meant && f->at && --f->at == 0) due = f;
    }
    return due;
}

/* --- queues ----------------------------------------------------------------------------------- */

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void call_unlocked(op_t *op) {
    pthread_mutex_unlock(&lock);
    if (op->kind == PYTHON) python(op->until);
    else op->call(op->data);
    pthread_mutex_lock(&lock);
}

static void complete(op_t *op) {
    if (op->kind == FAULT) {
        if (!sticky && *op->text) fprintf(stderr, "%s\n", op->text);
        sticky = sticky ? sticky : op->value;
        pending_faults--;
    } else if (op->kind == COPY_OUT) {
        if (!sticky) memcpy(op->to, op->data, op->n);
        free(op->data);
    } else if (op->kind == HOST_CALL && !sticky) {
        call_unlocked(op);
    } else if (op->kind == EVENT && op->event->seq == op->seq) {
        op->event->is_complete = 1;
        op->event->time_us = now_us();
    }
}

/* Complete a stream's queue up to an operation.  A fault is not reached unless the host waits. */
static void advance(stream_t *s, uint64_t until, int waits) {
    while (s->first && s->first->seq <= until) {
        op_t *op = s->first;
        if (op->kind == FAULT && !waits) return;
        if (op->kind == WAIT) {
            advance(op->other, op->until, waits);
            if (op->other->first && op->other->first->seq <= op->until) return;
            if (s->first != op) continue;
        }
        s->first = op->next;
        if (!s->first) s->end = &s->first;
        complete(op);
        free(op);
    }
}

static void advance_all(void) {
    advance(&legacy, UINT64_MAX, 1);
    for (stream_t *s = streams; s; s = s->next) advance(s, UINT64_MAX, 1);
}

static op_t *append(op_t ***end, enum kind kind) {
    op_t *op = calloc(1, sizeof *op);
    op->kind = kind;
    **end = op;
    *end = &op->next;
    return op;
}

static op_t *enqueue(stream_t *s, enum kind kind) {
    op_t *op = append(&s->end, kind);
    op->seq = ++s->issued;
    return op;
}

static void queued(stream_t *s) {
    if (!lags) advance(s, UINT64_MAX, 0);
}

static void wait_for(stream_t *s) {
    count.waits++;
    count.blocked += s->first != NULL;
    advance(s, UINT64_MAX, 1);
}

static stream_t *stream_of(cudaStream_t s) {
    return !s || s == cudaStreamLegacy || s == cudaStreamPerThread ? &legacy : s;
}

/* --- calls ------------------------------------------------------------------------------------ */

static int is_forbidden_by_capture(void) {
    for (graph_t *g = captures; g; g = g->next) {
        int is_mine = pthread_equal(g->thread, pthread_self());
        if (!g->is_open || thread_mode == cudaStreamCaptureModeRelaxed) continue;
        if (g->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal) return 1;
        if (is_mine && g->mode != cudaStreamCaptureModeRelaxed) return 1;
    }
    return 0;
}

static cudaError_t invalidate(cudaError_t error) {
    for (graph_t *g = captures; g; g = g->next) g->is_invalid |= g->is_open;
    return error;
}

static void in_child(void) {
    pthread_mutex_init(&lock, NULL);
    is_forked = has_context;
}
static void on_first_call(void) { pthread_atfork(NULL, NULL, in_child); }

static cudaError_t enter(const char *name, int flags) {
    pthread_once(&once, on_first_call);
    pthread_mutex_lock(&lock);
    if (is_forked && (flags & CONTEXT)) return cudaErrorInitializationError;
    fault_t *fault = fault_of(name, 1);
    if (fault && fault->code >= 700) sticky = fault->code;
    if (fault) return fault->code;
    if (sticky && ((flags & CONTEXT) || ((flags & UNKNOWN) && !is_narrow))) return sticky;
    has_context |= flags & CONTEXT;
    if ((flags & UNSAFE) && is_forbidden_by_capture()) return invalidate(cudaErrorStreamCaptureUnsupported);
    return cudaSuccess;
}

static cudaError_t leave(cudaError_t error) {
    if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
    pthread_mutex_unlock(&lock);
    return error;
}

#define ENTER(flags)                                \
    cudaError_t error_ = enter(__func__, (flags)); \
    if (error_ != cudaSuccess) return leave(error_)
#define DONE return leave(cudaSuccess)

cudaError_t standin_without_effect(const char *name, cudaError_t answer) {
    cudaError_t error = enter(name, CONTEXT);
    return leave(error ? error : answer);
}

const char *cudaGetErrorString(cudaError_t error) {
    for (size_t i = 0; i < sizeof error_texts / sizeof *error_texts; i++)
        if (error_texts[i].code == (int)error) return error_texts[i].text;
    return "unrecognized error code";
}
const char *cudaGetErrorName(cudaError_t error) {
    for (size_t i = 0; i < sizeof error_texts / sizeof *error_texts; i++)
        if (error_texts[i].code == (int)error) return error_texts[i].name;
    return "unrecognized error code";
}
cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }

/* --- device ----------------------------------------------------------------------------------- */

cudaError_t cudaGetDeviceCount(int *n) {
    ENTER(HOST);
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    *n = !visible || (*visible && *visible != '-');
    return leave(*n ? cudaSuccess : cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int *device) { ENTER(HOST); *device = 0; DONE; }
cudaError_t cudaSetDevice(int device) {
    ENTER(UNKNOWN);
    if (device) return leave(cudaErrorInvalidDevice);
    has_context = 1;
    DONE;
}
cudaError_t cudaDriverGetVersion(int *version) { ENTER(HOST); *version = CUDART_VERSION; DONE; }
cudaError_t cudaRuntimeGetVersion(int *version) { ENTER(HOST); *version = CUDART_VERSION; DONE; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    ENTER(HOST);
    if (device) return leave(cudaErrorInvalidDevice);
    *p = (struct cudaDeviceProp){
        .name = "Stand-in device (no GPU)", .totalGlobalMem = TOTAL, .major = 9, .minor = 0,
        .sharedMemPerBlock = 49152, .sharedMemPerBlockOptin = 232448, .sharedMemPerMultiprocessor = 233472,
        .regsPerBlock = 65536, .regsPerMultiprocessor = 65536, .warpSize = 32, .maxThreadsPerBlock = 1024,
        .maxThreadsDim = {1024, 1024, 64}, .maxGridSize = {2147483647, 65535, 65535},
        .totalConstMem = 65536, .multiProcessorCount = 132, .maxThreadsPerMultiProcessor = 2048,
        .maxBlocksPerMultiProcessor = 32, .l2CacheSize = 52428800, .textureAlignment = GRAIN,
        .unifiedAddressing = 1, .concurrentKernels = 1, .cooperativeLaunch = 1, .managedMemory = 1,
        .asyncEngineCount = 3, .memoryBusWidth = 5120,
    };
    DONE;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    static const int values[][2] = {
        {cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrMaxBlockDimX, 1024}, {cudaDevAttrMaxBlockDimY, 1024},
        {cudaDevAttrMaxBlockDimZ, 64}, {cudaDevAttrMaxGridDimX, 2147483647}, {cudaDevAttrMaxGridDimY, 65535},
        {cudaDevAttrMaxGridDimZ, 65535}, {cudaDevAttrMaxSharedMemoryPerBlock, 49152}, {cudaDevAttrWarpSize, 32},
        {cudaDevAttrMultiProcessorCount, 132}, {cudaDevAttrComputeCapabilityMajor, 9},
        {cudaDevAttrMaxThreadsPerMultiProcessor, 2048}, {cudaDevAttrL2CacheSize, 52428800},
        {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472}, {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
        {cudaDevAttrMaxRegistersPerBlock, 65536}, {cudaDevAttrUnifiedAddressing, 1},
        {cudaDevAttrConcurrentKernels, 1}, {cudaDevAttrCooperativeLaunch, 1}, {cudaDevAttrAsyncEngineCount, 3},
        {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
    };
    ENTER(HOST);
    if (device) return leave(cudaErrorInvalidDevice);
    *value = 0;
    for (size_t i = 0; i < sizeof values / sizeof *values; i++)
        if (values[i][0] == (int)attribute) *value = values[i][1];
    DONE;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { (void)a, (void)b; ENTER(HOST); *can = 0; DONE; }
cudaError_t cudaDeviceGetPCIBusId(char *id, int n, int device) {
    (void)device;
    ENTER(HOST);
    snprintf(id, (size_t)n, "0000:00:00.0");
    DONE;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    ENTER(UNKNOWN);
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    DONE;
}
cudaError_t cudaDeviceSynchronize(void) {
    ENTER(CONTEXT | UNSAFE);
    wait_for(&legacy);
    advance_all();
    return leave(sticky);
}
static int refused(void) { return cudaErrorNotSupported; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *status) {
    (void)name, (void)version, (void)flags;
    ENTER(HOST);
    *function = (void *)refused;
    if (status) *status = cudaDriverEntryPointSuccess;
    DONE;
}

/* --- memory calls ----------------------------------------------------------------------------- */

cudaError_t cudaMalloc(void **p, size_t n) {
    ENTER(CONTEXT | UNSAFE);
    *p = allocate(n);
    return leave(*p ? cudaSuccess : cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void *p) {
    ENTER(CONTEXT | UNSAFE);
    if (!p) DONE;
    advance_all();
    return leave(sticky ? (cudaError_t)sticky : release(p) ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    (void)device;
    ENTER(CONTEXT);
    *pool = (cudaMemPool_t)&blocks; /* there is one */
    DONE;
}
cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t stream) {
    (void)stream;
    ENTER(CONTEXT);
    *p = allocate(n);
    return leave(*p ? cudaSuccess : cudaErrorMemoryAllocation);
}
cudaError_t cudaFreeAsync(void *p, cudaStream_t stream) {
    (void)stream;
    ENTER(CONTEXT);
    return leave(release(p) ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    (void)pool, (void)attribute;
    ENTER(CONTEXT);
    *(uint64_t *)value = used;
    DONE;
}
cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
    ENTER(CONTEXT);
    *unused = TOTAL - used;
    *total = TOTAL;
    DONE;
}
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned flags) {
    (void)flags;
    ENTER(CONTEXT | UNSAFE);
    if (posix_memalign(p, 4096, n ? n : 1)) return leave(cudaErrorMemoryAllocation);
    pin(*p, n);
    DONE;
}
cudaError_t cudaFreeHost(void *p) {
    ENTER(CONTEXT | UNSAFE);
    if (p && !take_out(&pinned, p)) return leave(cudaErrorInvalidValue);
    free(p);
    DONE;
}
cudaError_t cudaHostRegister(void *p, size_t n, unsigned flags) {
    (void)flags;
    ENTER(CONTEXT | UNSAFE);
    if (block_of(pinned, p)) return leave(cudaErrorHostMemoryAlreadyRegistered);
    pin(p, n);
    DONE;
}
cudaError_t cudaHostUnregister(void *p) {
    ENTER(CONTEXT | UNSAFE);
    return leave(take_out(&pinned, p) ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    ENTER(CONTEXT);
    *a = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered, .device = -2, .hostPointer = (void *)p};
    if (block_of(blocks, p))
        *a = (struct cudaPointerAttributes){.type = cudaMemoryTypeDevice, .devicePointer = (void *)p};
    else if (block_of(pinned, p))
        *a = (struct cudaPointerAttributes){
            .type = cudaMemoryTypeHost, .devicePointer = (void *)p, .hostPointer = (void *)p};
    DONE;
}

/* Where an operation goes: into the graph that is captured, or into the queue. */
static op_t *record(stream_t *s, enum kind kind) {
    if (!s->capture) return enqueue(s, kind);
    s->capture->n++;
    return append(&s->capture->end, kind);
}

static void copy_now(stream_t *s, void *to, const void *from, size_t n) {
    if (!n) return;
    op_t *op = enqueue(s, on_device(to) ? WORK : COPY_OUT);
    if (op->kind == WORK) {
        if (!sticky && !pending_faults) memmove(bytes_of(to), bytes_of(from), n);
        return;
    }
    /* The host gets the bytes of now, once the stream has come so far. */
    count.copies_out++;
    op->to = to, op->n = n, op->data = malloc(n);
    memcpy(op->data, bytes_of(from), n);
}

static cudaError_t copy(void *to, const void *from, size_t n, cudaStream_t stream, int waits) {
    stream_t *s = stream_of(stream);
    if (is_beyond(to, n) || is_beyond(from, n)) return cudaErrorInvalidValue;
    if (s->capture) {
        if (waits) return invalidate(cudaErrorStreamCaptureUnsupported);
        op_t *op = record(s, COPY);
        op->to = to, op->from = from, op->n = n;
        return cudaSuccess;
    }
    copy_now(s, to, from, n);
    queued(s);
    if (waits || (!on_device(to) && !block_of(pinned, to))) wait_for(s); /* to pageable memory */
    return sticky;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind kind) {
    (void)kind;
    ENTER(CONTEXT | UNSAFE);
    return leave(copy(to, from, n, NULL, 1));
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind kind, cudaStream_t s) {
    (void)kind;
    ENTER(CONTEXT);
    return leave(copy(to, from, n, s, 0));
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t s) {
    (void)kind;
    ENTER(CONTEXT);
    cudaError_t error = cudaSuccess;
    for (size_t i = 0; i < height && !error; i++)
        error = copy((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width, s, 0);
    return leave(error);
}
static cudaError_t fill(void *p, int value, size_t n, cudaStream_t stream) {
    stream_t *s = stream_of(stream);
    if (is_beyond(p, n)) return cudaErrorInvalidValue;
    op_t *op = record(s, s->capture ? FILL : WORK);
    op->to = p, op->value = value, op->n = n;
    if (s->capture) return cudaSuccess;
    if (!pending_faults) memset(bytes_of(p), value, n);
    queued(s);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *p, int value, size_t n) { ENTER(CONTEXT | UNSAFE); return leave(fill(p, value, n, NULL)); }
cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t s) { ENTER(CONTEXT); return leave(fill(p, value, n, s)); }

/* Variables on the device. */
static struct variable {
    const void *host;
    void *at;
    size_t n;
    struct variable *next;
} *variables;

static void *address_of(const void *host) {
    struct variable *v = variables;
    while (v && v->host != host) v = v->next;
    if (v && !v->at) v->at = allocate(v->n);
    return v ? v->at : NULL;
}
cudaError_t cudaGetSymbolAddress(void **p, const void *symbol) {
    ENTER(CONTEXT);
    *p = address_of(symbol);
    return leave(*p ? cudaSuccess : cudaErrorInvalidSymbol);
}
cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t n, size_t offset, enum cudaMemcpyKind kind) {
    (void)kind;
    ENTER(CONTEXT);
    char *at = address_of(symbol);
    return leave(at ? copy(at + offset, from, n, NULL, 1) : cudaErrorInvalidSymbol);
}

/* --- streams and events ----------------------------------------------------------------------- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *made, unsigned flags, int priority) {
    (void)flags;
    ENTER(CONTEXT);
    stream_t *s = calloc(1, sizeof *s);
    s->end = &s->first, s->priority = priority, s->next = streams;
    *made = streams = s; /* for good: events name it */
    DONE;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithPriority(s, 0, 0); }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { ENTER(UNKNOWN); *priority = stream_of(s)->priority; DONE; }

/* What a query answers: a fault shows to who asks, unless the device lags. */
static cudaError_t asked(stream_t *s, uint64_t until) {
    if (!lags) advance(s, until, 1);
    if (sticky) return sticky;
    return s->first && s->first->seq <= until ? cudaErrorNotReady : cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    ENTER(CONTEXT);
    stream_t *s = stream_of(stream);
    return leave(s->capture ? invalidate(cudaErrorStreamCaptureUnsupported) : asked(s, UINT64_MAX));
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    ENTER(CONTEXT);
    stream_t *s = stream_of(stream);
    if (s->capture) return leave(invalidate(cudaErrorStreamCaptureUnsupported));
    wait_for(s);
    return leave(sticky);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t e, unsigned flags) {
    (void)flags;
    ENTER(CONTEXT);
    stream_t *s = stream_of(stream);
    if (e->capture && e->capture->is_open) s->capture = e->capture;
    else if (s->capture && e->is_recorded && !e->capture) /* work from before the capture */
        return leave(invalidate(cudaErrorStreamCaptureIsolation));
    else if (!s->capture && e->is_recorded && !e->is_complete && !e->capture) {
        op_t *op = enqueue(s, WAIT);
        op->other = e->stream, op->until = e->seq;
        queued(s);
    }
    DONE;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) {
    ENTER(CONTEXT);
    stream_t *s = stream_of(stream);
    op_t *op = record(s, HOST_CALL);
    op->call = call, op->data = data;
    if (!s->capture) queued(s);
    DONE;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) {
    ENTER(CONTEXT);
    *e = calloc(1, sizeof **e); /* for good: queues name it */
    (*e)->flags = flags;
    DONE;
}
cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t stream, unsigned flags) {
    (void)flags;
    ENTER(CONTEXT);
    stream_t *s = stream_of(stream);
    e->is_recorded = 1, e->is_complete = 0, e->stream = s, e->capture = s->capture;
    if (s->capture) DONE;
    op_t *op = enqueue(s, EVENT);
    op->event = e, e->seq = op->seq;
    queued(s);
    DONE;
}
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
cudaError_t cudaEventQuery(cudaEvent_t e) {
    ENTER(CONTEXT | UNSAFE);
    if (e->capture) return leave(e->capture->is_open ? cudaErrorCapturedEvent : (cudaError_t)sticky);
    return leave(e->is_recorded ? asked(e->stream, e->seq) : (cudaError_t)sticky);
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    ENTER(CONTEXT | UNSAFE);
    if (e->capture && e->capture->is_open) return leave(cudaErrorCapturedEvent);
    count.waits++;
    if (e->is_recorded && !e->is_complete && !e->capture) {
        count.blocked++;
        advance(e->stream, e->seq, 1);
    }
    return leave(sticky);
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
    ENTER(CONTEXT);
    if (!a->is_recorded || !b->is_recorded || ((a->flags | b->flags) & cudaEventDisableTiming))
        return leave(cudaErrorInvalidResourceHandle);
    if (!a->is_complete || !b->is_complete) return leave(cudaErrorNotReady);
    *ms = (float)((b->time_us - a->time_us) / 1e3);
    DONE;
}

/* --- kernels ---------------------------------------------------------------------------------- */

typedef struct { const void *host; const char *name; } kernel_t;
static kernel_t *kernels;
static size_t n_kernels;
static int is_sorted;

void **__cudaRegisterFatBinary(void *binary) { (void)binary; static void *handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
char __cudaInitModule(void **handle) { (void)handle; return 1; }
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, uint3 *thread,
                            uint3 *block, dim3 *block_dim, dim3 *grid_dim, int *size) {
    (void)handle, (void)device, (void)limit, (void)thread, (void)block, (void)block_dim, (void)grid_dim, (void)size;
    pthread_mutex_lock(&lock);
    if (n_kernels % 4096 == 0) kernels = realloc(kernels, (n_kernels + 4096) * sizeof *kernels);
    kernels[n_kernels++] = (kernel_t){host, name};
    is_sorted = 0;
    pthread_mutex_unlock(&lock);
}
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int ext, size_t n, int constant, int global) {
    (void)handle, (void)device, (void)name, (void)ext, (void)constant, (void)global;
    struct variable *v = malloc(sizeof *v);
    pthread_mutex_lock(&lock);
    *v = (struct variable){host, NULL, n, variables};
    variables = v;
    pthread_mutex_unlock(&lock);
}

static int by_host(const void *a, const void *b) {
    const void *x = ((const kernel_t *)a)->host, *y = ((const kernel_t *)b)->host;
    return (x > y) - (x < y);
}
static const char *name_of(const void *host) {
    if (!is_sorted) qsort(kernels, n_kernels, sizeof *kernels, by_host);
    is_sorted = 1;
    kernel_t *found = bsearch(&(kernel_t){host, NULL}, kernels, n_kernels, sizeof *kernels, by_host);
    return found ? found->name : "unknown";
}

static void run_kernel(stream_t *s, const char *name) {
    count.launches++;
    fault_t *fault = next_fault.code ? &next_fault : fault_of(name, 0);
    op_t *op = enqueue(s, fault ? FAULT : WORK);
    if (!fault) return;
    pending_faults++;
    op->value = fault->code;
    op->text = strdup(fault->text ? fault->text : "");
    next_fault.code = 0;
}

static cudaError_t launched(stream_t *s) {
    const char *blocking = getenv("CUDA_LAUNCH_BLOCKING");
    queued(s);
    if (blocking && *blocking && *blocking != '0') wait_for(s);
    return sticky;
}

static cudaError_t launch(const char *name, dim3 grid, dim3 block, cudaStream_t stream) {
    stream_t *s = stream_of(stream);
    if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535 || !block.x || !block.y || !block.z ||
        block.x * block.y * block.z > 1024)
        return cudaErrorInvalidConfiguration;
    if (s->capture) {
        record(s, KERNEL)->text = name;
        return cudaSuccess;
    }
    run_kernel(s, name);
    return launched(s);
}
cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) {
    (void)args, (void)shared;
    ENTER(CONTEXT);
    return leave(launch(name_of(f), grid, block, s));
}
cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) {
    return cudaLaunchKernel(f, grid, block, args, shared, s);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *f, void **args) {
    return cudaLaunchKernel(f, config->gridDim, config->blockDim, args, 0, config->stream);
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *f) { *kernel = (cudaKernel_t)f; return cudaSuccess; }
cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) {
    return cudaLaunchKernel((const void *)f, grid, block, args, shared, s);
}

static __thread struct { dim3 grid, block; size_t shared; void *stream; } configurations[16];
static __thread int depth;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    if (depth == 16) return 1;
    configurations[depth].grid = grid, configurations[depth].block = block;
    configurations[depth].shared = shared, configurations[depth++].stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    if (!depth) return cudaErrorMissingConfiguration;
    depth--;
    *grid = configurations[depth].grid, *block = configurations[depth].block;
    *shared = configurations[depth].shared, *(void **)stream = configurations[depth].stream;
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    (void)f;
    ENTER(CONTEXT);
    *a = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024, .numRegs = 32, .ptxVersion = 90, .binaryVersion = 90, .maxDynamicSharedSizeBytes = 49152};
    DONE;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int block, size_t shared, unsigned flags) {
    (void)f, (void)block, (void)shared, (void)flags;
    ENTER(CONTEXT);
    *n = 2;
    DONE;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int block, size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, f, block, shared, 0);
}

/* --- graphs ----------------------------------------------------------------------------------- */

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    ENTER(HOST);
    enum cudaStreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    DONE;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    ENTER(CONTEXT);
    stream_t *s = stream_of(stream);
    if (s == &legacy) return leave(cudaErrorStreamCaptureUnsupported);
    if (s->capture) return leave(cudaErrorIllegalState);
    graph_t *g = calloc(1, sizeof *g);
    *g = (graph_t){.mode = mode, .is_open = 1, .thread = pthread_self(), .id = ++count.graphs, .next = captures};
    g->end = &g->first;
    s->capture = captures = g;
    DONE;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    ENTER(CONTEXT);
    graph_t *g = *graph = stream_of(stream)->capture;
    if (!g) return leave(cudaErrorIllegalState);
    for (stream_t *s = streams; s; s = s->next)
        if (s->capture == g) s->capture = NULL;
    g->is_open = 0;
    if (g->is_invalid) *graph = NULL;
    return leave(g->is_invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess);
}
static enum cudaStreamCaptureStatus status_of(graph_t *g) {
    if (!g) return cudaStreamCaptureStatusNone;
    return g->is_invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
    ENTER(UNKNOWN);
    *status = status_of(stream_of(s)->capture);
    DONE;
}
#if CUDART_VERSION < 13000
#define EDGES
#else
#define EDGES const cudaGraphEdgeData **edges,
#endif
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, EDGES size_t *n) {
    ENTER(UNKNOWN);
    graph_t *g = stream_of(s)->capture;
    *status = status_of(g);
    if (g && id) *id = g->id;
    if (g && graph) *graph = g;
    if (nodes) *nodes = NULL;
#if CUDART_VERSION >= 13000
    if (edges) *edges = NULL;
#endif
    if (n) *n = 0;
    DONE;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *n) {
    ENTER(CONTEXT);
    for (size_t i = 0; nodes && i < *n && i < g->n; i++) nodes[i] = (cudaGraphNode_t)(i + 1);
    *n = g->n;
    DONE;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t g, unsigned long long flags) {
    (void)flags;
    ENTER(CONTEXT);
    *made = (cudaGraphExec_t)g; /* a graph stays as it was captured, and is never freed */
    DONE;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t made, cudaStream_t stream) {
    ENTER(CONTEXT);
    stream_t *s = stream_of(stream);
    for (op_t *op = ((graph_t *)made)->first; op; op = op->next) {
        int runs = !sticky && !pending_faults;
        if (op->kind == KERNEL) run_kernel(s, op->text);
        else if (op->kind == COPY) copy_now(s, op->to, op->from, op->n);
        else if (op->kind == PYTHON && runs) call_unlocked(op);
        else if (op->kind == FILL && runs) memset(bytes_of(op->to), op->value, op->n);
        else if (op->kind == HOST_CALL) {
            op_t *call = enqueue(s, HOST_CALL);
            call->call = op->call, call->data = op->data;
        }
    }
    return leave(launched(s));
}

/* --- what the tests use ----------------------------------------------------------------------- */

intptr_t standin_shift(void) {
    map_memory();
    return shift;
}
uint64_t standin_count(const char *what) {
    if (!strcmp(what, "waits")) return count.waits;
    if (!strcmp(what, "blocked")) return count.blocked;
    if (!strcmp(what, "launches")) return count.launches;
    if (!strcmp(what, "copies_out")) return count.copies_out;
    if (!strcmp(what, "context")) return (uint64_t)has_context;
    return !strcmp(what, "healthy") ? !sticky && !pending_faults : UINT64_MAX;
}
void standin_fault(const char *what, uint64_t at, int code, const char *text) {
    fault_t *f = malloc(sizeof *f);
    pthread_mutex_lock(&lock);
    *f = (fault_t){strdup(what), strdup(text), at, code, faults};
    faults = f;
    pthread_mutex_unlock(&lock);
}
/* The next launch of this thread fails; code 0 takes that back. */
void standin_fail_next(int code, const char *text) {
    free(next_fault.text);
    next_fault.code = code;
    next_fault.text = strdup(text);
}
void standin_lag(int is_on) {
    pthread_mutex_lock(&lock);
    advance_all();
    lags = is_on;
    pthread_mutex_unlock(&lock);
}
void standin_narrow(int is_on) { is_narrow = is_on; }
void standin_python(void (*f)(uint64_t)) { python = f; }
/* Let a replay of the graph that is captured call Python; 0 where none is. */
int standin_capture(void *stream, uint64_t number) {
    pthread_mutex_lock(&lock);
    stream_t *s = stream_of(stream);
    if (s->capture && number) record(s, PYTHON)->until = number;
    pthread_mutex_unlock(&lock);
    return s->capture != NULL;
}
/* The launch of an op whose work is done in Python. */
int standin_launch(const char *name, void *stream) {
    ENTER(CONTEXT);
    return leave(launch(name, (dim3){1, 1, 1}, (dim3){1, 1, 1}, stream));
}
