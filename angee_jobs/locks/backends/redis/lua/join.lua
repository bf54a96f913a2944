-- Take a free place, or a shared hold, of a key that has no exclusive one.
--
-- KEYS  the gate, the index, the token counter, the tombstone of this owner, the members, the word of a waiter
-- ARGV  name, owner, ttl in microseconds, holder, places (-1: shared), what stands before an id in the key of its hold
-- Returns the head of the hold and its place, or 0 if refused.

local gate = redis.call('GET', KEYS[1])
if gate and #gate < 112 then
    return redis.error_reply('ERR not a hold: ' .. KEYS[1])
end
local open = ends(gate) > now and owner_of(gate) == GATE
if ends(gate) > now and not open then
    return 0
end
local places = tonumber(ARGV[5])
local shared = places < 0
local id, mine = find(KEYS[1], KEYS[5], ARGV[6], ARGV[2], shared)
if mine then
    return string.sub(mine, 1, 48) .. (shared and '' or id) -- asked again, because the first answer got lost
end
if redis.call('EXISTS', KEYS[4]) == 1 then
    return 0 -- this request was given up, and comes late
end
-- A word stands until an exclusive hold has got another token.
if gate and owner_of(gate) == GATE and redis.pcall('GET', KEYS[6]) == string.sub(gate, 17, 32) then
    return 0
end
local over = open and string.format('%.0f', now) or '+inf' -- without the gate, all of them
for _, dead in ipairs(redis.call('ZRANGEBYSCORE', KEYS[5], '-inf', over)) do
    remove(KEYS[2], KEYS[5], ARGV[6], ARGV[1], dead)
end
if shared then
    id = ARGV[2]
else
    local taken = {}
    for _, each in ipairs(redis.call('ZRANGE', KEYS[5], 0, -1)) do
        taken[each] = true
    end
    for place = 0, places - 1 do
        id = string.format('%.0f', place)
        if not taken[id] then
            break
        end
        id = nil
    end
    if not id then
        return 0
    end
end

local token = next_token(KEYS[3], now)
if not token then
    return redis.error_reply('ERR not a fencing token: ' .. KEYS[3])
end
local expires = now + ARGV[3]
local rest = string.format('%016.0f%016.0f', token, now)
local head = string.format('%016.0f', expires) .. rest
local last_end = open and math.max(ends(gate), expires) or expires
redis.pcall('ZADD', KEYS[2], string.format('%.0f', expires), ARGV[1] .. '\1' .. id)
redis.pcall('ZADD', KEYS[2], string.format('%.0f', last_end), ARGV[1])
redis.call('ZADD', KEYS[5], string.format('%.0f', expires), id)
redis.call(
    'MSET', KEYS[3], string.format('%.0f', token), ARGV[6] .. id, head .. ARGV[2] .. ARGV[4],
    KEYS[1], string.format('%016.0f', last_end) .. rest .. GATE
)
return head .. (shared and '' or id)
