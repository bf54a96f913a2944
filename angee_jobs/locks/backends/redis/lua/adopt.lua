-- Make the live hold of one owner the hold of another.
--
-- KEYS  the hold, the index
-- ARGV  name, owner, new owner, ttl in microseconds, holder
-- Returns the head of the hold, or 0 if it is gone.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local hold = redis.call('GET', KEYS[1])
local expires = hold and tonumber(string.sub(hold, 1, 16))
if not expires or expires <= now then
    return 0
end
local owner = string.sub(hold, 49, 112)
if owner == ARGV[3] then
    return string.sub(hold, 1, 48) -- asked again, because the first answer got lost
end
if owner ~= ARGV[2] then
    return 0
end
expires = now + ARGV[4]
local head = string.format('%016.0f', expires) .. string.sub(hold, 17, 48)
-- Never sooner in the index than it was, or a list that goes by it might miss the hold. To be tidied up later is no harm.
redis.pcall('ZADD', KEYS[2], string.format('%.0f', math.max(expires, tonumber(string.sub(hold, 1, 16)))), ARGV[1])
redis.call('SET', KEYS[1], head .. ARGV[3] .. ARGV[5])
return head
