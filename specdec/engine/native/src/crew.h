// A fixed number of threads that do one job together and meet between its parts. The caller is one of them.
#pragma once
#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace {

class Crew {
   public:
    explicit Crew(int size) : size_(size) {
        for (int i = 1; i < size; i++) others_.emplace_back([this, i] { wait_for_jobs(i); });
    }

    ~Crew() {
        job_ = nullptr;
        begin();
        for (auto& other : others_) other.join();
    }

    int size() const { return size_; }

    // job(i) on thread i of 0 … size-1; returns when all are done.
    void run(const std::function<void(int)>& job) {
        job_ = &job;
        if (size_ > 1) begin();
        job(0);
        meet();
    }

    // Returns when every thread has come here.
    void meet() {
        if (size_ == 1) return;
        const uint32_t turn = turn_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            turn_.store(turn + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; turn_.load(std::memory_order_acquire) == turn; spins++) {
            if (spins < PATIENCE) _mm_pause();
            else sched_yield();  // somebody else may need this core to get here
        }
    }

   private:
    static constexpr int PATIENCE = 2000;

    void begin() {
        jobs_.fetch_add(1, std::memory_order_release);
        jobs_.notify_all();
    }

    void wait_for_jobs(int i) {
        for (uint32_t seen = 0;; seen++) {
            jobs_.wait(seen, std::memory_order_acquire);
            if (job_ == nullptr) return;
            (*job_)(i);
            meet();
        }
    }

    const int size_;
    const std::function<void(int)>* job_ = nullptr;
    std::atomic<uint32_t> jobs_{0}, turn_{0};
    std::atomic<int> arrived_{0};
    std::vector<std::thread> others_;
};

// Piece `i` of `size` of n things.
struct Share {
    int64_t from, to;
    Share(int64_t n, int i, int size) : from(n * i / size), to(n * (i + 1) / size) {}
};

}  // namespace
