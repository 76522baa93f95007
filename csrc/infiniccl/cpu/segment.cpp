// Shared memory and processes; see segment.h.
#include "segment.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "setting.h"

namespace infini::ccl {

namespace {

constexpr size_t kPage = 4096;

constexpr size_t rounded_up(size_t value, size_t to) {
    return (value + to - 1) / to * to;
}

[[noreturn]] void system_error(const char *function, const std::string &what, int error) {
    throw Error(INFINI_STATUS_INTERNAL_ERROR, message(function, ": ", what, ": ", std::strerror(error)));
}

// Field 22 of /proc/<pid>/stat (the start time), or 0. Sets *ended if the process does not exist or is a zombie.
uint64_t start_of(int pid, bool *ended) {
    *ended = false;
    const int file = ::open(message("/proc/", pid, "/stat").c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        *ended = kill(pid, 0) != 0 && errno == ESRCH;
        return 0;
    }
    char text[1024];
    const ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    if (size <= 0) {
        *ended = true; // the process ended between the two calls
        return 0;
    }
    text[size] = 0;
    const char *at = std::strrchr(text, ')'); // the process name before it may hold any character
    if (at == nullptr) {
        return 0;
    }
    *ended = at[1] != 0 && (at[2] == 'Z' || at[2] == 'X');
    for (int field = 2; field < 22 && at != nullptr; ++field) {
        at = std::strchr(at + 1, ' ');
    }
    return at == nullptr ? 0 : std::strtoull(at, nullptr, 10);
}

// Removes files that no process has locked: the ranks of those communicators were all killed while they joined.
void sweep(const std::string &folder) {
    DIR *const entries = opendir(folder.c_str());
    if (entries == nullptr) {
        return;
    }
    while (const dirent *entry = readdir(entries)) {
        if (std::strncmp(entry->d_name, kNamePrefix, std::strlen(kNamePrefix)) != 0) {
            continue;
        }
        const int file = openat(dirfd(entries), entry->d_name, O_RDWR | O_CLOEXEC);
        if (file >= 0) {
            if (flock(file, LOCK_EX | LOCK_NB) == 0) {
                unlinkat(dirfd(entries), entry->d_name, 0);
            }
            close(file);
        }
    }
    closedir(entries);
}

uint64_t own_pid_namespace() {
    struct stat status;
    return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

} // namespace

Segment::Segment(int file, int ranks) : file_(file), ranks_(ranks) {
    const auto n = static_cast<size_t>(ranks);
    members_ = sizeof(Header);
    progress_ = members_ + n * sizeof(Member);
    channels_ = progress_ + n * sizeof(Progress);
    data_ = rounded_up(channels_ + n * n * sizeof(Channel), kPage);
    part_bytes_ = kSlotBytes / n / 64 * 64;
    rank_bytes_ = rounded_up(2 * kSlotBytes + 2 * part_bytes_, kPage);
    base_bytes_ = data_ + n * rank_bytes_;
    bytes_ = base_bytes_ + n * n * 2 * kChannelSlotBytes;
}

Segment::~Segment() {
    if (memory_ != nullptr) {
        munmap(memory_, bytes_);
    }
    close(file_);
}

void Segment::map(const char *function) {
    void *const mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_, 0);
    if (mapped == MAP_FAILED) {
        system_error(function, message("cannot map ", bytes_, " bytes of shared memory"), errno);
    }
    memory_ = static_cast<char *>(mapped);
#ifdef MADV_POPULATE_WRITE
    madvise(memory_, base_bytes_, MADV_POPULATE_WRITE); // otherwise the first calls would fault page by page
#endif
}

// Accessing a page of the file that has no memory raises SIGBUS, so all pages are allocated first.
void Segment::reserve(const char *function, size_t begin, size_t bytes) const {
    int error;
    do {
        error = posix_fallocate(file_, static_cast<off_t>(begin), static_cast<off_t>(bytes));
    } while (error == EINTR);
    if (error != 0) {
        system_error(function, message("no shared memory of ", bytes, " bytes for ", ranks_, " ranks"), error);
    }
}

void Segment::reserve_channel(const char *function, int from, int to) const {
    reserve(function, channel_data(from, to), 2 * kChannelSlotBytes);
}

bool checks_calls(const char *function) {
    return setting_is_on("INFINI_CCL_CHECK", false, function);
}

std::shared_ptr<Segment> Segment::make(const char *function, int file, int ranks) {
    if (file < 0) {
        system_error(function, "cannot make a file for shared memory", errno);
    }
    std::shared_ptr<Segment> segment(new Segment(file, ranks));
    if (ftruncate(file, static_cast<off_t>(segment->bytes_)) != 0) {
        system_error(function, message("no shared memory of ", segment->bytes_, " bytes for ", ranks, " ranks"), errno);
    }
    segment->reserve(function, 0, segment->base_bytes_);
    segment->map(function);
    Header &header = segment->header();
    header.ranks = ranks;
    header.checked = checks_calls(function);
    return segment;
}

std::shared_ptr<Segment> Segment::anonymous(const char *function, int ranks) {
    return make(function, memfd_create("infiniccl", MFD_CLOEXEC), ranks);
}

// The file gets its name when it is complete, so a rank that can open it can use it. Every rank holds a lock on it; the
// lock ends with the rank's process.
std::shared_ptr<Segment> Segment::create(const char *function, const std::string &path, int ranks) {
    const std::string folder = path.substr(0, path.rfind('/'));
    sweep(folder);
    std::shared_ptr<Segment> segment =
        make(function, ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, S_IRUSR | S_IWUSR), ranks);
    flock(segment->file_, LOCK_SH);
    const std::string unnamed = message("/proc/self/fd/", segment->file_);
    if (linkat(AT_FDCWD, unnamed.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) != 0) {
        if (errno == EEXIST) {
            throw Error(INFINI_STATUS_BAD_PARAM, message(function, ": rank must be given once, got 0 twice"));
        }
        system_error(function, message("cannot make ", path), errno);
    }
    return segment;
}

std::shared_ptr<Segment> Segment::open(const char *function, const std::string &path, int ranks) {
    const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) {
        if (errno == ENOENT) {
            return nullptr;
        }
        system_error(function, message("cannot open ", path), errno);
    }
    flock(file, LOCK_SH);
    std::shared_ptr<Segment> segment(new Segment(file, ranks));
    int32_t theirs = 0;
    if (pread(file, &theirs, sizeof theirs, offsetof(Header, ranks)) != sizeof theirs || theirs != ranks) {
        throw Error(INFINI_STATUS_BAD_PARAM, message(function, ": nranks must be rank 0's, ", theirs, ", got ", ranks));
    }
    struct stat status;
    if (fstat(file, &status) != 0 || static_cast<size_t>(status.st_size) != segment->bytes_) {
        throw Error(
            INFINI_STATUS_INTERNAL_ERROR,
            message(function, ": rank 0 is of another build of libinfiniccl, with another layout of its memory"));
    }
    segment->map(function);
    return segment;
}

void describe_self(Member &member) {
    bool ended;
    member.pid = getpid();
    member.started = start_of(member.pid, &ended);
    member.pid_namespace = own_pid_namespace();
}

bool is_alive(const Member &member) {
    if (member.pid == getpid() || member.pid_namespace != own_pid_namespace()) {
        return true;
    }
    bool ended;
    const uint64_t started = start_of(member.pid, &ended);
    return !ended && (started == 0 || started == member.started);
}

} // namespace infini::ccl
