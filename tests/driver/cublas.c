/* cuBLAS and cuBLASLt: matrix products that take the time of their operations, and handles that take memory. */
#include "played.h"

#include <stdlib.h>
#include <string.h>

enum { NOT_INITIALIZED = 1, ALLOCATION_FAILED = 3, EXECUTION_FAILED = 13 };
enum { FP32 = 0, FP16 = 2, BF16 = 14 }; /* of cudaDataType */
#define BATCH_COUNT 5                   /* of cublasLtMatrixLayoutAttribute_t */

typedef struct {
    uint64_t rows, columns;
    int type, batch;
} Layout;

static int math_mode;

int cublasCreate_v2(void **handle) {
    if (enter())
        return NOT_INITIALIZED;
    return load_library() ? ALLOCATION_FAILED : new_handle(handle);
}

int cublasLtCreate(void **handle) {
    return new_handle(handle);
}

int cublasSetMathMode(void *handle, int mode) {
    math_mode = mode;
    return 0;
}

int cublasGetMathMode(void *handle, int *mode) {
    *mode = math_mode;
    return 0;
}

int cublasGetPointerMode_v2(void *handle, int *mode) {
    *mode = 0;
    return 0;
}

size_t cublasLtGetVersion(void) {
    return 130100;
}

static int is_short(int type) {
    return type == FP16 || type == BF16;
}

static int is_tf32(int type) {
    return type == FP32 && (math_mode & 3) == 3;
}

static double flops_of(int type) {
    const Card *card = &settings.cards[device_now()];
    return is_short(type) ? card->bf16_flops : is_tf32(type) ? card->tf32_flops : card->fp32_flops;
}

static double watts_of(int type) {
    const Card *card = &settings.cards[device_now()];
    return is_short(type) ? card->bf16_w : is_tf32(type) ? card->tf32_w : card->fp32_w;
}

static int multiply(double m, double n, double k, double batch, int type) {
    if (count_launch("gemm"))
        return EXECUTION_FAILED;
    work_at(settings.launch_ns * 2 + 2 * m * n * k * batch * 1e9 / flops_of(type), watts_of(type));
    return 0;
}

int cublasSgemm_v2(void *handle, int turn_a, int turn_b, int m, int n, int k) {
    return multiply(m, n, k, 1, FP32);
}

int cublasGemmEx(void *handle, int turn_a, int turn_b, int m, int n, int k, const void *alpha, const void *a,
                 int type) {
    return multiply(m, n, k, 1, type);
}

int cublasSgemmStridedBatched(void *handle, int turn_a, int turn_b, int m, int n, int k, const void *alpha,
                              const void *a, int lda, long long stride_a, const void *b, int ldb, long long stride_b,
                              const void *beta, void *c, int ldc, long long stride_c, int batch) {
    return multiply(m, n, k, batch, FP32);
}

int cublasGemmStridedBatchedEx(void *handle, int turn_a, int turn_b, int m, int n, int k, const void *alpha,
                               const void *a, int type, int lda, long long stride_a, const void *b, int type_b, int ldb,
                               long long stride_b, const void *beta, void *c, int type_c, int ldc, long long stride_c,
                               int batch) {
    return multiply(m, n, k, batch, type);
}

/* ---- cuBLASLt */

int cublasLtMatrixLayoutCreate(Layout **layout, int type, uint64_t rows, uint64_t columns, long long leading) {
    *layout = malloc(sizeof **layout);
    **layout = (Layout){rows, columns, type, 1};
    return 0;
}

int cublasLtMatrixLayoutSetAttribute(Layout *layout, int attribute, const void *value, size_t size) {
    if (attribute == BATCH_COUNT)
        layout->batch = *(int *)value;
    return 0;
}

int cublasLtMatrixLayoutDestroy(Layout *layout) {
    free(layout);
    return 0;
}

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int asked, char *results, int *found) {
    memset(results, 0, 96); /* one algorithm, without a workspace */
    *found = 1;
    return 0;
}

int cublasLtMatmul(void *handle, void *operation, const void *alpha, const void *a, Layout *layout_a, const void *b,
                   Layout *layout_b, const void *beta, const void *c, Layout *layout_c, void *d, Layout *layout_d) {
    double k = layout_d->rows ? (double)layout_a->rows * layout_a->columns / layout_d->rows : 0;
    return multiply(layout_d->rows, layout_d->columns, k, layout_d->batch, layout_a->type);
}
