// Collectives between ranks that share memory.
//
// The ranks proceed in steps, which have the same numbers on all ranks. In step s a rank
//   1. waits until all ranks have posted s - 1,
//   2. writes what the others need into its slot s % 2, and posts s,
//   3. waits until the ranks that it reads from have posted s, and reads their slots.
// Posting s means: the rank's slot is written, and the rank has read the slots of all earlier steps. So the slot that a
// rank writes in step s, which others read in step s - 2, is free, and a step costs one flag in each direction.
//
// A reduction combines the ranks in order, element by element: its bits depend neither on the algorithm nor on the rank
// that computes it.
#include <sched.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "dtype.h"
#include "guard.h"
#include "reduce.h"
#include "segment.h"

namespace infini::ccl {

namespace {

using Clock = std::chrono::steady_clock;

// Up to this many bytes every rank reduces the whole message by itself, in one step. Above, each rank reduces a part
// and shares the result: two steps, but less work.
constexpr size_t kOneShotBytes = 64 * 1024;

// A wait first spins, then yields to other threads, then sleeps. The spin count adapts: it doubles after a successful
// spin and halves after a failed one, because the other rank may need this core. (Two ranks on one core, an 8-byte
// all-reduce: 7 us with a minimal spin count, 100 us with a high one.)
constexpr int kMinSpins = 16, kMaxSpins = 2048; // in pause instructions; the maximum takes up to 50 us
constexpr auto kYields = std::chrono::milliseconds(2);
constexpr int kSleepShare = 16; // a sleep lasts a sixteenth of the wait so far, which bounds the added delay
constexpr auto kLongestSleep = std::chrono::milliseconds(10);
constexpr auto kLookInterval = std::chrono::milliseconds(20); // between two checks whether a rank is alive

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb"); // takes about ten cycles; most cores ignore yield
#endif
}

// ---- a call's signature, which ranks compare, and its description ----

Signature signature_of(const Call &call) {
    return {call.count, call.kind, static_cast<uint8_t>(call.dtype), static_cast<uint8_t>(call.op),
            static_cast<uint8_t>(call.peer)};
}

std::string words_of(const Signature &signature) {
    constexpr const char *functions[] = {"infinicclCommInitRank", "infinicclAllReduce",     "infinicclBroadcast",
                                         "infinicclAllGather",    "infinicclReduceScatter", "infinicclSend",
                                         "infinicclRecv"};
    constexpr const char *ops[] = {"SUM", "PROD", "MAX", "MIN", "AVG"};
    std::string text = message(functions[static_cast<int>(signature.kind)], " of ", signature.count, " ",
                               name_of(static_cast<infiniDtype_t>(signature.dtype)));
    if (signature.kind == Kind::all_reduce || signature.kind == Kind::reduce_scatter) {
        text += message(" (", ops[signature.op], ")");
    } else if (signature.kind == Kind::broadcast) {
        text += message(" (root ", static_cast<int>(signature.peer), ")");
    }
    return text;
}

// ---- one rank ----

class CpuCommunicator : public Communicator {
public:
    CpuCommunicator(std::shared_ptr<Segment> segment, int rank, int ranks, int64_t timeout_ms)
        : Communicator(INFINI_DEVICE_CPU, 0, rank, ranks), segment_(std::move(segment)), header_(segment_->header()),
          timeout_ms_(timeout_ms), channels_(new Ends[static_cast<size_t>(ranks)]) {}

    ~CpuCommunicator() override {
        Member &member = segment_->member(rank);
        if (joined_ && member.pid == getpid()) { // not in a child of fork(): the parent is still the rank
            member.presence.store(kLeft, std::memory_order_release);
        }
    }

    // Registers this rank and makes it visible to the others. Returns whether it was the last one.
    bool join(const char *function) {
        Member &member = segment_->member(rank);
        int32_t absent = kAbsent;
        if (!member.presence.compare_exchange_strong(absent, kClaimed)) {
            throw Error(INFINI_STATUS_BAD_PARAM, message(function, ": rank must be given once, got ", rank, " twice"));
        }
        joined_ = true;
        describe_self(member);
        member.presence.store(kPresent, std::memory_order_release);
        post(kInit);
        return header_.mapped.fetch_add(1) + 1 == ranks;
    }

    void wait_for_all_to_join() { wait_for_all(kInit); }

    void run(const Call &call, infinirtStream_t stream) override {
        stream == nullptr ? execute(call) : queue(call, stream);
    }

    void abort() override {
        fail(INFINI_STATUS_INTERNAL_ERROR, message(name_of(rank), " has aborted the communicator"));
    }

    void set_timeout(int64_t timeout_ms) override { timeout_ms_ = timeout_ms; }

private:
    static constexpr Call kInit{"infinicclCommInitRank", Kind::init,    nullptr, nullptr, 0,
                                INFINI_DTYPE_INVALID,    INFINICCL_SUM, 0};

    // This rank's ends of its channels with one other rank.
    struct Ends {
        std::mutex sending, receiving;
        uint64_t sent = 0, received = 0;
        bool reserved = false;
    };

    struct Queued {
        std::shared_ptr<Communicator> communicator;
        Call call;
    };

    void queue(const Call &call, infinirtStream_t stream) {
        auto queued = std::make_unique<Queued>(Queued{shared_from_this(), call});
        const infiniStatus_t status = infinirtStreamLaunchHostFunction(
            stream,
            [](void *data) {
                const auto *work = static_cast<const Queued *>(data);
                return guarded([&] { work->communicator->run(work->call, nullptr); });
            },
            queued.get(), [](void *data) { delete static_cast<Queued *>(data); });
        if (status != INFINI_STATUS_SUCCESS) {
            throw Error(status, infiniGetLastErrorMessage());
        }
        queued.release();
    }

    void execute(const Call &call) {
        if (call.kind == Kind::send) {
            return send(call);
        }
        if (call.kind == Kind::recv) {
            return recv(call);
        }
        const std::lock_guard<std::mutex> lock(steps_);
        throw_if_failed(call);
        if (ranks == 1) { // with one rank every collective is this copy; there is nothing to round
            return copy(static_cast<char *>(call.recv), static_cast<const char *>(call.send),
                        call.count * size_of(call.dtype));
        }
        if (header_.checked != 0) {
            begin(call);
            post(call);
            wait_for_all(call);
        }
        switch (call.kind) {
        case Kind::all_reduce:
            return call.count * size_of(call.dtype) <= kOneShotBytes ? all_reduce_at_once(call) : all_reduce(call);
        case Kind::broadcast:
            return broadcast(call);
        case Kind::all_gather:
            return all_gather(call);
        default:
            return reduce_scatter(call);
        }
    }

    // ---- steps ----

    void begin(const Call &call) {
        if (all_posted_ < step_) {
            wait_for_all(call);
        }
        ++step_;
    }

    void post(const Call &call) {
        Progress &mine = segment_->progress(rank);
        mine.signatures[step_ % 2] = signature_of(call);
        mine.posted.store(step_, std::memory_order_release);
    }

    // Waits until rank `other` has posted this rank's latest step; `call` is for messages.
    void wait_for(int other, const Call &call) {
        const Progress &theirs = segment_->progress(other);
        wait(other, theirs.posted, step_, call);
        const Signature &signature = theirs.signatures[step_ % 2];
        if (const Signature &mine = segment_->progress(rank).signatures[step_ % 2]; !(signature == mine)) {
            differ(call, "the ranks must make the same calls in the same order", mine, rank, signature, other);
        }
    }

    void wait_for_all(const Call &call) {
        for (int other = 0; other < ranks; ++other) {
            if (other != rank) {
                wait_for(other, call);
            }
        }
        all_posted_ = step_;
    }

    char *my_slot() const { return segment_->slot(rank, step_ % 2); }
    const char *slot_of(int other) const { return segment_->slot(other, step_ % 2); }

    // ---- collectives ----

    // Calls body(first element, elements) for each chunk of at most `most` elements, at least once.
    template <typename Body> static void for_each_chunk(size_t count, size_t most, const Body &body) {
        size_t begin = 0;
        do {
            const size_t size = std::min(most, count - begin);
            body(begin, size);
            begin += size;
        } while (begin < count);
    }

    // Data is always copied into shared memory, never computed there. Ordinary stores to lines that another core has
    // read stall one by one (8 to 35 GB/s on two Zen 5 cores); memcpy's string moves do not (42 to 100 GB/s).
    static void copy(char *to, const char *from, size_t bytes) {
        if (bytes > 0 && to != from) {
            std::memcpy(to, from, bytes);
        }
    }

    // out[i] = the reduction of `mine` and of the other ranks' slots, which are read from byte `offset` on.
    void reduce_slots(const Call &call, char *out, const char *mine, size_t offset, size_t count) const {
        const void *in[kMaxRanks];
        for (int other = 0; other < ranks; ++other) {
            in[other] = other == rank ? mine : slot_of(other) + offset;
        }
        reduce(ExecutionContext{}, {out, in, ranks, static_cast<int64_t>(count), call.dtype, call.op});
    }

    void all_reduce_at_once(const Call &call) {
        const auto *from = static_cast<const char *>(call.send);
        begin(call);
        copy(my_slot(), from, call.count * size_of(call.dtype));
        post(call);
        wait_for_all(call);
        reduce_slots(call, static_cast<char *>(call.recv), from, 0, call.count);
    }

    // Rank j reduces part j of a chunk, which lies at j * part_bytes() in the slots for any chunk size. While the ranks
    // reduce one chunk, they share the results of the previous one.
    void all_reduce(const Call &call) {
        const size_t bytes = size_of(call.dtype), n = static_cast<size_t>(ranks), me = static_cast<size_t>(rank);
        const size_t pitch = segment_->part_bytes(), line = 64 / bytes, most = pitch / bytes * n;
        const auto *from = static_cast<const char *>(call.send);
        auto *to = static_cast<char *>(call.recv);
        struct Chunk {
            size_t begin = 0, count = 0, part = 0;
            size_t part_begin(size_t j) const { return begin + std::min(j * part, count); }
            size_t part_count(size_t j) const { return std::min((j + 1) * part, count) - std::min(j * part, count); }
        } chunk, before;
        for (size_t next = 0; next < call.count || before.count > 0; next += chunk.count) {
            chunk.begin = next;
            chunk.count = std::min(most, call.count - next);
            chunk.part = (chunk.count + n * line - 1) / (n * line) * line;
            begin(call);
            for (size_t j = 0; j < n; ++j) {
                if (j != me) {
                    copy(my_slot() + j * pitch, from + chunk.part_begin(j) * bytes, chunk.part_count(j) * bytes);
                }
            }
            post(call);
            wait_for_all(call);
            for (size_t j = 0; j < n; ++j) {
                if (j != me) {
                    copy(to + before.part_begin(j) * bytes, segment_->result(static_cast<int>(j), (step_ - 1) % 2),
                         before.part_count(j) * bytes);
                }
            }
            const size_t own = chunk.part_begin(me) * bytes;
            reduce_slots(call, to + own, from + own, me * pitch, chunk.part_count(me));
            copy(segment_->result(rank, step_ % 2), to + own, chunk.part_count(me) * bytes);
            before = chunk;
        }
    }

    void broadcast(const Call &call) {
        const size_t bytes = size_of(call.dtype);
        const auto *from = static_cast<const char *>(call.send);
        auto *to = static_cast<char *>(call.recv);
        const bool is_root = call.peer == rank;
        for_each_chunk(call.count, kSlotBytes / bytes, [&](size_t first, size_t count) {
            begin(call);
            if (is_root) {
                copy(my_slot(), from + first * bytes, count * bytes);
                copy(to + first * bytes, from + first * bytes, count * bytes);
            }
            post(call);
            if (!is_root) {
                wait_for(call.peer, call);
                copy(to + first * bytes, slot_of(call.peer), count * bytes);
            }
        });
    }

    void all_gather(const Call &call) {
        const size_t bytes = size_of(call.dtype);
        const auto *from = static_cast<const char *>(call.send);
        auto *to = static_cast<char *>(call.recv);
        for_each_chunk(call.count, kSlotBytes / bytes, [&](size_t first, size_t count) {
            begin(call);
            copy(my_slot(), from + first * bytes, count * bytes);
            post(call);
            wait_for_all(call);
            for (int other = 0; other < ranks; ++other) {
                copy(to + (static_cast<size_t>(other) * call.count + first) * bytes,
                     other == rank ? from + first * bytes : slot_of(other), count * bytes);
            }
        });
    }

    void reduce_scatter(const Call &call) {
        const size_t bytes = size_of(call.dtype), pitch = segment_->part_bytes();
        const auto *from = static_cast<const char *>(call.send);
        auto *to = static_cast<char *>(call.recv);
        const auto share = [&](int of) { return from + static_cast<size_t>(of) * call.count * bytes; };
        for_each_chunk(call.count, pitch / bytes, [&](size_t first, size_t count) {
            begin(call);
            for (int other = 0; other < ranks; ++other) {
                if (other != rank) {
                    copy(my_slot() + static_cast<size_t>(other) * pitch, share(other) + first * bytes, count * bytes);
                }
            }
            post(call);
            wait_for_all(call);
            reduce_slots(call, to + first * bytes, share(rank) + first * bytes, static_cast<size_t>(rank) * pitch,
                         count);
        });
    }

    // ---- one rank to another: a ring of two slots ----

    void send(const Call &call) {
        Ends &ends = channels_[static_cast<size_t>(call.peer)];
        const std::lock_guard<std::mutex> lock(ends.sending);
        throw_if_failed(call);
        if (!ends.reserved) {
            segment_->reserve_channel(call.function, rank, call.peer);
            ends.reserved = true;
        }
        Channel &channel = segment_->channel(rank, call.peer);
        const size_t bytes = size_of(call.dtype);
        const auto *from = static_cast<const char *>(call.send);
        for_each_chunk(call.count, kChannelSlotBytes / bytes, [&](size_t first, size_t count) {
            if (ends.sent >= 2) {
                wait(call.peer, channel.received, ends.sent - 1, call);
            }
            copy(segment_->channel_slot(rank, call.peer, ends.sent % 2), from + first * bytes, count * bytes);
            channel.signatures[ends.sent % 2] = signature_of(call);
            channel.sent.store(++ends.sent, std::memory_order_release);
        });
    }

    void recv(const Call &call) {
        Ends &ends = channels_[static_cast<size_t>(call.peer)];
        const std::lock_guard<std::mutex> lock(ends.receiving);
        throw_if_failed(call);
        Channel &channel = segment_->channel(call.peer, rank);
        const size_t bytes = size_of(call.dtype);
        auto *to = static_cast<char *>(call.recv);
        for_each_chunk(call.count, kChannelSlotBytes / bytes, [&](size_t first, size_t count) {
            wait(call.peer, channel.sent, ends.received + 1, call);
            const Signature sent = channel.signatures[ends.received % 2], mine = signature_of(call);
            if (sent.count != mine.count || sent.dtype != mine.dtype) {
                differ(call, "a send and its receive must have the same count and datatype", mine, rank, sent,
                       call.peer);
            }
            copy(to + first * bytes, segment_->channel_slot(call.peer, rank, ends.received % 2), count * bytes);
            channel.received.store(++ends.received, std::memory_order_release);
        });
    }

    // ---- waits and failures ----

    void wait(int other, const std::atomic<uint64_t> &counter, uint64_t value, const Call &call) {
        const auto there = [&] { return counter.load(std::memory_order_acquire) >= value; };
        if (there()) {
            return;
        }
        const int spins = spins_.load(std::memory_order_relaxed);
        for (int i = 0; i < spins; ++i) {
            relax();
            if (there()) {
                return spins_.store(std::min(2 * spins, kMaxSpins), std::memory_order_relaxed);
            }
        }
        spins_.store(std::max(spins / 2, kMinSpins), std::memory_order_relaxed);
        wait_long(other, counter, value, call);
    }

    void wait_long(int other, const std::atomic<uint64_t> &counter, uint64_t value, const Call &call) {
        const auto there = [&] { return counter.load(std::memory_order_acquire) >= value; };
        const int64_t timeout_ms = timeout_ms_;
        const Clock::time_point start = Clock::now();
        Clock::duration next_look = kLookInterval;
        while (!there()) {
            throw_if_failed(call);
            const Clock::duration waited = Clock::now() - start;
            if (waited >= next_look) {
                next_look = waited + kLookInterval;
                // While joining, check all ranks; later only the awaited one: others may have posted all that is needed
                // and ended.
                for (int any = 0; any < ranks; ++any) {
                    const char *const gone = any == other || call.kind == Kind::init ? why_gone(any) : nullptr;
                    if (gone != nullptr && !there()) { // a post made just before its end still counts
                        fail_and_throw(call, INFINI_STATUS_INTERNAL_ERROR, message(name_of(any), gone));
                    }
                }
            }
            if (waited >= std::chrono::milliseconds(timeout_ms)) {
                const bool joining = call.kind == Kind::init;
                fail_and_throw(
                    call, INFINI_STATUS_INTERNAL_ERROR,
                    message(&counter == &segment_->progress(other).posted ? names_of_missing(value) : name_of(other),
                            " did not ", joining ? "join" : "arrive", " within ",
                            static_cast<double>(timeout_ms) / 1000, " s"));
            }
            if (waited < kYields) {
                sched_yield();
            } else {
                std::this_thread::sleep_for(std::min<Clock::duration>(waited / kSleepShare, kLongestSleep));
            }
        }
    }

    // Returns nullptr if the rank may still come.
    const char *why_gone(int other) const {
        const Member &member = segment_->member(other);
        const int32_t presence = member.presence.load(std::memory_order_acquire);
        if (presence == kLeft) {
            return " has destroyed its communicator";
        }
        return presence == kPresent && !is_alive(member) ? " has ended" : nullptr;
    }

    // The rank's description, with its process id unless all ranks that have joined are in one process.
    std::string name_of(int which) const {
        const auto pid_of = [&](int other) {
            const Member &member = segment_->member(other);
            return member.presence.load(std::memory_order_acquire) >= kPresent ? member.pid : 0;
        };
        const int32_t pid = pid_of(which);
        bool alone = true;
        for (int other = 0; other < ranks; ++other) {
            alone = alone && (pid_of(other) == 0 || pid_of(other) == pid);
        }
        return pid == 0 || alone ? message("rank ", which) : message("rank ", which, " (pid ", pid, ")");
    }

    std::string names_of_missing(uint64_t step) const {
        std::string names;
        for (int other = 0; other < ranks; ++other) {
            if (segment_->progress(other).posted.load(std::memory_order_acquire) < step) {
                names += (names.empty() ? "" : ", ") + name_of(other);
            }
        }
        return names;
    }

    [[noreturn]] void differ(const Call &call, const char *rule, const Signature &mine, int my_rank,
                             const Signature &theirs, int their_rank) {
        fail_and_throw(call, INFINI_STATUS_BAD_PARAM,
                       message(rule, ", got ", words_of(mine), " on ", name_of(my_rank), " and ", words_of(theirs),
                               " on ", name_of(their_rank)));
    }

    // Records the failure. All ranks report the first one.
    void fail(infiniStatus_t status, const std::string &sentence) {
        int32_t sound = kSound;
        if (header_.failed.compare_exchange_strong(sound, kFailing)) {
            header_.status = status;
            std::snprintf(header_.sentence, sizeof header_.sentence, "%s", sentence.c_str());
            header_.failed.store(kFailed, std::memory_order_release);
        }
    }

    [[noreturn]] void fail_and_throw(const Call &call, infiniStatus_t status, const std::string &sentence) {
        fail(status, sentence);
        throw_if_failed(call);
        throw Error(status, message(call.function, ": ", sentence)); // not reached: the check has thrown
    }

    void throw_if_failed(const Call &call) const {
        int32_t failed = header_.failed.load(std::memory_order_acquire);
        if (failed == kSound) {
            return;
        }
        // The other rank needs a few instructions, unless it ended in between.
        for (int i = 0; failed == kFailing && i < 100; ++i) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
            failed = header_.failed.load(std::memory_order_acquire);
        }
        if (failed == kFailing) {
            throw Error(INFINI_STATUS_INTERNAL_ERROR, message(call.function, ": a rank failed and ended"));
        }
        throw Error(header_.status, message(call.function, ": ", header_.sentence));
    }

    const std::shared_ptr<Segment> segment_;
    Header &header_;
    std::atomic<int64_t> timeout_ms_;
    std::atomic<int> spins_{kMaxSpins};
    bool joined_ = false;

    std::mutex steps_;                       // held by the running collective
    uint64_t step_ = 1, all_posted_ = 1;     // 1: the rank has joined
    const std::unique_ptr<Ends[]> channels_; // indexed by the other rank
};

// ---- the backend ----

constexpr int kNonceBytes = 16;

std::string path_of(const char *function, const infinicclUniqueId_t &id) {
    const std::string name(id.internal, strnlen(id.internal, sizeof id.internal));
    const size_t prefix = std::strlen(kNamePrefix);
    if (name.compare(0, prefix, kNamePrefix) != 0 || name.size() != prefix + 2 * kNonceBytes ||
        name.find_first_not_of("0123456789abcdef", prefix) != std::string::npos) {
        throw Error(INFINI_STATUS_BAD_PARAM,
                    message(function, ": unique_id must be one of infinicclGetUniqueId for the CPU"));
    }
    return "/dev/shm/" + name;
}

void check_ranks(const char *function, const char *argument, int ranks) {
    if (ranks > kMaxRanks) {
        throw Error(INFINI_STATUS_BAD_PARAM,
                    message(function, ": ", argument, " must be at most ", kMaxRanks, " on the CPU, got ", ranks));
    }
}

// Finds rank 0's file, which may appear after this rank.
std::shared_ptr<Segment> find_segment(const char *function, const std::string &path, int ranks, int64_t timeout_ms) {
    const Clock::time_point end = Clock::now() + std::chrono::milliseconds(timeout_ms);
    for (;;) {
        if (std::shared_ptr<Segment> segment = Segment::open(function, path, ranks)) {
            return segment;
        }
        if (Clock::now() >= end) {
            throw Error(INFINI_STATUS_INTERNAL_ERROR, message(function, ": rank 0 did not join within ",
                                                              static_cast<double>(timeout_ms) / 1000, " s"));
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

class CpuBackend : public Backend {
public:
    infinicclUniqueId_t unique_id() override {
        unsigned char nonce[kNonceBytes];
        if (getrandom(nonce, sizeof nonce, 0) != sizeof nonce) {
            throw Error(INFINI_STATUS_INTERNAL_ERROR, "infinicclGetUniqueId: the system gives no random numbers");
        }
        infinicclUniqueId_t id = {};
        char *at = id.internal + std::snprintf(id.internal, sizeof id.internal, "%s", kNamePrefix);
        for (const unsigned char byte : nonce) {
            at += std::snprintf(at, 3, "%02x", byte);
        }
        return id;
    }

    Communicators init_all(const std::vector<int> &device_ids, int64_t timeout_ms) override {
        constexpr const char *function = "infinicclCommInitAll";
        const int ranks = static_cast<int>(device_ids.size());
        check_ranks(function, "ndevice", ranks);
        const std::shared_ptr<Segment> segment = Segment::anonymous(function, ranks);
        Communicators made;
        for (int rank = 0; rank < ranks; ++rank) {
            const auto communicator = std::make_shared<CpuCommunicator>(segment, rank, ranks, timeout_ms);
            communicator->join(function);
            made.push_back(communicator);
        }
        return made;
    }

    std::shared_ptr<Communicator> init_rank(int ranks, const infinicclUniqueId_t &id, int rank, int,
                                            int64_t timeout_ms) override {
        constexpr const char *function = "infinicclCommInitRank";
        check_ranks(function, "nranks", ranks);
        checks_calls(function); // only rank 0's setting takes effect, but every rank reports an invalid one
        const std::string path = path_of(function, id);
        const std::shared_ptr<Segment> segment =
            rank == 0 ? Segment::create(function, path, ranks) : find_segment(function, path, ranks, timeout_ms);
        const auto communicator = std::make_shared<CpuCommunicator>(segment, rank, ranks, timeout_ms);
        const bool is_last = communicator->join(function);
        if (is_last) {
            unlink(path.c_str());
            return communicator; // the last rank need not wait
        }
        try {
            communicator->wait_for_all_to_join();
        } catch (...) {
            unlink(path.c_str());
            throw;
        }
        return communicator;
    }
};

const Registered<CpuBackend> registered{INFINI_DEVICE_CPU};

} // namespace

} // namespace infini::ccl
