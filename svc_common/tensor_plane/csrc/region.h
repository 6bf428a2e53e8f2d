// One shared region: created and owned by the CPU attention service, mapped by one executor.
//
// Liveness is exact and costs nothing while all is well: each side holds a lock on its own byte of the file
// through its own open file description, and the kernel drops the lock with the process, however that ends.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "layout.h"
#include "populate.h"

namespace neoflex {

enum class Side : off_t { owner = 0, executor = 1 };  // the byte each side locks

[[noreturn]] inline void throw_errno(const std::string& what, int error = errno) {
    throw PlaneError(what + ": " + std::strerror(error));
}

class FileDescriptor {
  public:
    explicit FileDescriptor(int fd) : fd_(fd) {}
    FileDescriptor(const FileDescriptor&) = delete;
    FileDescriptor& operator=(const FileDescriptor&) = delete;
    ~FileDescriptor() { ::close(fd_); }
    int get() const { return fd_; }

  private:
    const int fd_;
};

inline struct flock lock_request(Side side) {
    struct flock request {};
    request.l_type = F_WRLCK;
    request.l_whence = SEEK_SET;
    request.l_start = static_cast<off_t>(side);
    request.l_len = 1;
    return request;
}

// Takes a side's byte. False where another open file description holds it.
inline bool try_lock(int fd, Side side) {
    auto request = lock_request(side);
    if (fcntl(fd, F_OFD_SETLK, &request) == 0) return true;
    if (errno == EAGAIN || errno == EACCES) return false;
    throw_errno("cannot lock the region");
}

inline void unlock(int fd, Side side) {
    auto request = lock_request(side);
    request.l_type = F_UNLCK;
    fcntl(fd, F_OFD_SETLK, &request);
}

// Whether another open file description holds a side's byte.
inline bool is_locked(int fd, Side side) {
    auto request = lock_request(side);
    if (fcntl(fd, F_OFD_GETLK, &request) != 0) throw_errno("cannot test the region's locks");
    return request.l_type != F_UNLCK;
}

class Region {
  public:
    // Makes the file and takes the owner's byte. The pool gets as many blocks as fit into `pool_bytes`; header and
    // exchange slots come on top. All of it is there when this returns, each part first touched on one of `cpus`, where
    // the threads that will read it are pinned. Removes the file again where anything fails.
    static std::unique_ptr<Region> create(const std::string& path, std::uint64_t epoch, const Shape& shape,
                                          std::size_t pool_bytes, const std::vector<int>& cpus) {
        shape.check();
        const std::size_t block_bytes = shape.block_bytes();
        const std::size_t lower_bytes = shape.lower_block_bytes();
        const auto num_gpu_blocks = static_cast<std::size_t>(shape.num_gpu_blocks);
        // Their product may be more than there are numbers.
        const bool fits = lower_bytes == 0 || num_gpu_blocks <= pool_bytes / lower_bytes;
        const std::size_t gpu_bytes = fits ? num_gpu_blocks * lower_bytes : pool_bytes;
        const std::size_t num_blocks = (pool_bytes - gpu_bytes) / block_bytes;
        if (num_blocks < 1)
            throw PlaneError("a pool of " + std::to_string(pool_bytes) + " bytes holds no block: one takes " +
                             std::to_string(block_bytes) +
                             (gpu_bytes == 0 ? "" : ", the GPU's " + std::to_string(num_gpu_blocks) +
                                                       " in the CPU layers " + std::to_string(lower_bytes) + " each"));
        if (num_blocks > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max()))
            throw PlaneError("a pool of " + std::to_string(pool_bytes) + " bytes has more blocks than can be numbered");
        const Layout layout = layout_of(shape, static_cast<std::int32_t>(num_blocks));
        const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (fd < 0) throw_errno(path);
        auto file = std::make_unique<FileDescriptor>(fd);
        try {
            return std::unique_ptr<Region>(
                new Region(path, std::move(file), epoch, shape, static_cast<std::int32_t>(num_blocks), layout, cpus));
        } catch (...) {
            ::unlink(path.c_str());
            throw;
        }
    }

    // Maps a region that another process made, and takes the executor's byte. Refuses any other layout, epoch or
    // shape than the one asked for.
    static std::unique_ptr<Region> attach(const std::string& path, std::uint64_t epoch, const Shape& shape) {
        const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
        if (fd < 0) throw_errno(path);
        return std::unique_ptr<Region>(new Region(path, std::make_unique<FileDescriptor>(fd), epoch, shape));
    }

    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;
    ~Region() {
        close();
        ::munmap(base_, mapped_bytes_);
    }

    Control& control() const { return *std::launder(reinterpret_cast<Control*>(base_)); }
    const Shape& shape() const { return shape_; }
    const Layout& layout() const { return layout_; }
    std::int32_t num_blocks() const { return num_blocks_; }
    std::uint64_t epoch() const { return epoch_; }
    std::byte* base() const { return base_; }
    std::byte* slot(int index) const { return base_ + layout_.exchange_offset + index * layout_.slot_bytes; }
    // [max_tokens, hidden_size], on the way through the CPU layers
    float* hidden() const { return reinterpret_cast<float*>(base_ + layout_.hidden_offset); }
    std::int32_t num_lower_blocks() const { return shape_.num_gpu_blocks + num_blocks_; }
    // K and V of one layer in its pool, which for a CPU layer is the lower one: [num_blocks or num_lower_blocks, 2,
    // num_kv_heads, block_tokens * head_dim]
    std::byte* pool_layer(int layer) const {
        const std::size_t bytes = blocks_before(layer) * shape_.layer_block_bytes();
        return base_ + (is_lower(layer) ? layout_.lower_offset : layout_.pool_offset) + bytes;
    }
    // Likewise [..., 2, num_kv_heads], null unless the pools are in int8
    float* scales_layer(int layer) const {
        if (shape_.layer_block_scales() == 0) return nullptr;
        std::byte* scales = base_ + (is_lower(layer) ? layout_.lower_scales_offset : layout_.scales_offset);
        return reinterpret_cast<float*>(scales) + blocks_before(layer) * shape_.layer_block_scales();
    }

    bool is_closed() const { return control().closed.load(std::memory_order_acquire) != 0; }
    bool is_attached() const { return control().attached.load(std::memory_order_acquire) != 0; }

    // Whether the other side's process holds its lock. For the owner, only once `is_attached`.
    bool peer_alive() const {
        return is_locked(file_->get(), side_ == Side::owner ? Side::executor : Side::owner);
    }

    // Gives the region up: waits on it end, on both sides. The mapping stays until this object goes, since arrays
    // that were handed out still point into it.
    void close() {
        control().closed.store(1, std::memory_order_release);
        for (auto& bell : control().submitted) bell.nudge();
        for (auto& bell : control().completed) bell.nudge();
        control().layers_submitted.nudge();
        control().layers_completed.nudge();
        unlock(file_->get(), side_);
    }

  private:
    bool is_lower(int layer) const { return layer < shape_.num_cpu_layers; }
    // In the layer's pool, of the layers before it.
    std::size_t blocks_before(int layer) const {
        if (is_lower(layer)) return static_cast<std::size_t>(layer) * num_lower_blocks();
        return static_cast<std::size_t>(layer - shape_.num_cpu_layers) * num_blocks_;
    }

    Region(const std::string& path, std::unique_ptr<FileDescriptor> file, std::uint64_t epoch, const Shape& shape,
           std::int32_t num_blocks, const Layout& layout, const std::vector<int>& cpus)
        : file_(std::move(file)), side_(Side::owner), shape_(shape), layout_(layout), num_blocks_(num_blocks),
          epoch_(epoch) {
        struct stat status {};
        // A sweeper of stale regions may have come between open and lock.
        if (!try_lock(file_->get(), side_) || fstat(file_->get(), &status) != 0 || status.st_nlink == 0)
            throw PlaneError(path + ": was taken for stale while it was made; try again");
        mapped_bytes_ = file_bytes();
        reserve(path, cpus);
        auto* control = new (base_) Control{};
        control->version = layout_version;
        control->num_blocks = num_blocks;
        control->epoch = epoch;
        control->region_bytes = layout.region_bytes;
        control->shape = shape;
        control->refused_iteration.store(no_iteration, std::memory_order_relaxed);
        control->magic.store(region_magic, std::memory_order_release);
    }

    Region(const std::string& path, std::unique_ptr<FileDescriptor> file, std::uint64_t epoch, const Shape& shape)
        : file_(std::move(file)), side_(Side::executor), shape_(shape), epoch_(epoch) {
        struct stat status {};
        if (fstat(file_->get(), &status) != 0) throw_errno(path);
        mapped_bytes_ = static_cast<std::size_t>(status.st_size);
        if (mapped_bytes_ < page_bytes) throw PlaneError(path + ": too small for a region");
        map(path);
        try {
            check_control(path);
            if (!try_lock(file_->get(), side_)) throw PlaneError(path + ": another executor is attached");
            if (!peer_alive()) throw PlaneError(path + ": the process that made this region is gone");
        } catch (...) {
            ::munmap(base_, mapped_bytes_);
            throw;
        }
        control().attached.store(1, std::memory_order_release);
    }

    // The region in whole pages of the file system, which are huge on hugetlbfs.
    std::size_t file_bytes() const {
        struct statvfs status {};
        if (fstatvfs(file_->get(), &status) != 0) throw_errno("cannot look at the region's file system");
        return round_up(layout_.region_bytes, std::max<std::size_t>(status.f_bsize, page_bytes));
    }

    // Sets the size, maps the file and fills it.
    void reserve(const std::string& path, const std::vector<int>& cpus) {
        const std::string what = path + ": cannot reserve " + std::to_string(mapped_bytes_) + " bytes";
        struct statvfs status {};
        if (fstatvfs(file_->get(), &status) != 0) throw_errno(what);
        // Said at once, not after filling all there is. A file system of 0 blocks has no limit.
        if (status.f_blocks > 0 && status.f_bavail * status.f_frsize < mapped_bytes_) throw_errno(what, ENOSPC);
        if (ftruncate(file_->get(), static_cast<off_t>(mapped_bytes_)) != 0) throw_errno(what);
        map(path);
        int error = populate(base_, mapped_bytes_, cpus);
        if (error == EINVAL) error = ::posix_fallocate(file_->get(), 0, static_cast<off_t>(mapped_bytes_));
        if (error == 0) return;
        ::munmap(base_, mapped_bytes_);
        throw_errno(what, error);
    }

    void map(const std::string& path) {
        void* base = ::mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_->get(), 0);
        if (base == MAP_FAILED) throw_errno(path + ": cannot map " + std::to_string(mapped_bytes_) + " bytes");
        base_ = static_cast<std::byte*>(base);
    }

    void check_control(const std::string& path) {
        const Control& found = control();
        if (found.magic.load(std::memory_order_acquire) != region_magic)
            throw PlaneError(path + ": not a NeoFlex region");
        if (found.version != layout_version)
            throw PlaneError(path + ": layout version " + std::to_string(found.version) + ", this side has " +
                             std::to_string(layout_version));
        if (found.epoch != epoch_)
            throw PlaneError(path + ": epoch " + std::to_string(found.epoch) + ", expected " + std::to_string(epoch_));
        if (!(found.shape == shape_)) throw PlaneError(path + ": made for another shape");
        shape_.check();
        num_blocks_ = found.num_blocks;
        // Its file has no room for more, and no product of it is too large for a number.
        if (num_blocks_ < 1 || static_cast<std::size_t>(num_blocks_) > mapped_bytes_ / shape_.block_bytes())
            throw PlaneError(path + ": cannot have " + std::to_string(num_blocks_) + " blocks");
        layout_ = layout_of(shape_, num_blocks_);
        if (found.region_bytes != layout_.region_bytes || mapped_bytes_ != file_bytes())
            throw PlaneError(path + ": has " + std::to_string(mapped_bytes_) + " bytes, its header says " +
                             std::to_string(found.region_bytes) + ", its shape takes " +
                             std::to_string(layout_.region_bytes));
    }

    std::unique_ptr<FileDescriptor> file_;
    Side side_;
    Shape shape_;
    Layout layout_{};
    std::int32_t num_blocks_ = 0;
    std::uint64_t epoch_;
    std::byte* base_ = nullptr;
    std::size_t mapped_bytes_ = 0;
};

}  // namespace neoflex
